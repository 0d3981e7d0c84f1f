from django.contrib import admin
from django.urls import path

from example_project.inbox.views import receive

urlpatterns = [
    path("admin/", admin.site.urls),
    path("webhooks/<slug:source>/", receive, name="webhook"),
]
