from django.apps import AppConfig


class PenstockConfig(AppConfig):  # type: ignore[misc]
    name = "penstock.django"
    label = "penstock"
    verbose_name = "Penstock"
    default_auto_field = "django.db.models.BigAutoField"
