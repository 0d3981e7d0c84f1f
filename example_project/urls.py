from django.contrib import admin
from django.urls import include, path

from example_project.inbox.views import receive

urlpatterns = [
    path("admin/", admin.site.urls),
    path("webhooks/<slug:source>/", receive, name="webhook"),
    path("live/", include("example_project.live.urls")),
]
