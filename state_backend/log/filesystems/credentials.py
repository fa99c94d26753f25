"""Options for object stores from the environment, in addition to those that obstore reads itself.

obstore reads the stores' usual variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION,
AWS_ENDPOINT_URL, AWS_WEB_IDENTITY_TOKEN_FILE, the roles of containers and machines; GOOGLE_APPLICATION_CREDENTIALS;
AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID and the like. It does not
read AWS's profile files; boto3 does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from state_backend.model.errors import LogUnavailableError

# As in AWS's own tools, each of these variables takes precedence over the profile files.
_OTHER_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def client_options() -> dict[str, Any]:
    """Return the options of obstore's HTTP client: plain HTTP is allowed if an endpoint begins with http://."""
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return {"allow_http": True} if any(os.environ.get(name, "").startswith("http://") for name in names) else {}


def options(location: str) -> dict[str, Any]:
    """Return the options that obstore does not read from the environment itself."""
    return {"credential_provider": _profile()} if location.startswith("s3://") and _uses_profile() else {}


def _uses_profile() -> bool:
    if "AWS_PROFILE" in os.environ:
        return True
    files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    return not any(name in os.environ for name in _OTHER_CREDENTIALS) and Path(files).exists()


def _profile() -> Any:
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise LogUnavailableError(
            "AWS_PROFILE, or a file of AWS credentials, needs boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
    try:
        return Boto3CredentialProvider(boto3.Session())
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise LogUnavailableError(f"AWS's credentials cannot be read: {error}") from None
