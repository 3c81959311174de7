"""Ray's token, to be looked for before ray is imported: it reads then whether tokens are in use.

``ray start`` has a cluster ask for a token when it finds one. Who joins by address has to say that
there is one.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
WAY_OUT = (
    f"set {MODE}=token, with the cluster's token in ~/.ray/auth_token, in {_TOKEN} or in the file"
    f" that {_TOKEN_PATH} names; `ray get-auth-token` prints it where the head runs"
)


def show_token(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have Ray show its token if it has one; a cluster that asks for none does not mind.

    What the environment says of tokens stands.
    """
    if MODE not in environment and _has_token(environment):
        environment[MODE] = "token"


def refuses_token(said: str) -> bool:
    """Whether what Ray said is that a token is missing or another than the cluster's."""
    return "authentication token" in said.lower()


def _has_token(environment: MutableMapping[str, str]) -> bool:
    """Whether a token is where Ray looks."""
    if environment.get(_TOKEN):
        return True
    folder = Path(environment.get("HOME", "")) / ".ray"
    return Path(environment.get(_TOKEN_PATH) or folder / "auth_token").is_file()
