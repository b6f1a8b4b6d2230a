"""A site of Django with the applications that come with it; their migrations run at a source."""

import os

from psycopg.conninfo import conninfo_to_dict

_server = conninfo_to_dict(os.environ.get("DJANGO_DATABASE", ""))
SECRET_KEY = "none"
INSTALLED_APPS = [
    f"django.contrib.{name}"
    for name in ("admin", "auth", "contenttypes", "flatpages", "redirects", "sessions", "sites")
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        **{key.upper(): _server.get(key) for key in ("host", "port", "user")},
        "NAME": _server.get("dbname"),
    }
}
SITE_ID = 1
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
