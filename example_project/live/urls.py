from django.urls import path

from example_project.live import views

app_name = "live"
urlpatterns = [
    path("", views.page, name="page"),
    path("notes/", views.post, name="post"),
    path("stream/", views.stream, name="stream"),
]
