from django.contrib import admin

from example_project.inbox.models import Delivery, Summary


@admin.register(Delivery)
class DeliveryAdmin(admin.ModelAdmin):
    list_display = ("id", "source", "size", "received_at")
    list_filter = ("source",)


@admin.register(Summary)
class SummaryAdmin(admin.ModelAdmin):
    list_display = ("id", "text", "delivery", "created_at")
    list_select_related = ("delivery",)
    search_fields = ("text",)
