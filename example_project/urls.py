from django.contrib import admin
from django.urls import include, path

from example_project.inbox.views import order_digest, receive, show_digest

urlpatterns = [
    path("admin/", admin.site.urls),
    path("webhooks/<slug:source>/", receive, name="webhook"),
    path("live/", include("example_project.live.urls")),
    path("webhooks/<slug:source>/digest/", order_digest, name="order-digest"),
    path("digests/<str:result_id>/", show_digest, name="digest"),
]
