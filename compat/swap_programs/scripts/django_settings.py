"""The settings of django_checks."""

import os

OPTIONS = {"CLIENT_CLASS": "django_redis.client.DefaultClient"}
CACHES = {
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": os.environ["REDIS_URL"], "OPTIONS": OPTIONS}
}
INSTALLED_APPS = ["django.contrib.sessions"]
SESSION_ENGINE = "django.contrib.sessions.backends.cache"
DJANGO_REDIS_SCAN_ITERSIZE = 10
