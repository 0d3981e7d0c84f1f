"""
Settings of the example project, read from the environment.

`DATABASE_URL` is required. `manage.py` sets it to the URL of the development server.
"""

from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env(
    DEBUG=(bool, True),
    ALLOWED_HOSTS=(list, []),
)

DEBUG = env("DEBUG")
# The default is not secret. Without DEBUG, the environment must provide a real key.
SECRET_KEY = env("SECRET_KEY", default="only-for-development") if DEBUG else env("SECRET_KEY")
ALLOWED_HOSTS = env("ALLOWED_HOSTS")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_pgqueue",
    "example_project.demo",
    "example_project.inbox",
    "example_project.live",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

database = env.db("DATABASE_URL")
# The folder of a unix socket is a parameter of the URL. Django's own tools, such as dbshell,
# expect it in HOST.
database["HOST"] = database.get("OPTIONS", {}).pop("host", database["HOST"])
DATABASES = {"default": database}

# Settings of the queue, as a JSON object.
PGQUEUE = env.json("PGQUEUE_SETTINGS", default={})

# Seconds without an event after which the live page's stream sends a comment.
LIVE_HEARTBEAT = env.float("LIVE_HEARTBEAT", default=15)

TASKS = {
    "default": {
        "BACKEND": "django_pgqueue.task_backend.PGQueueBackend",
        "QUEUES": ["inbox.digests"],
    }
}

STATIC_URL = "static/"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
