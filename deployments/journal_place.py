"""Where the router actor's journal is, and how it spells adapters' paths there."""

import os
from pathlib import Path

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.journal import session_journal
from deployments.ray_internals import session_folder

IN_MEMORY = ":memory:"
"""`router.journal` that keeps no file."""


def journal_file(setting: str | None) -> Path | None:
    """The file of `router.journal`; None keeps everything in memory, as an unset one does outside Ray Serve."""
    if setting is not None:
        return None if setting == IN_MEMORY else Path(setting).expanduser()
    folder = session_folder()
    try:
        actor = serve.get_deployment_actor_context()
    except RayServeException:
        return None
    return session_journal(folder, actor.app_name, actor.deployment) if folder is not None else None


def one_spelling(path: str) -> str:
    """The absolute path of a folder on this machine; anything else may be a Hub id, or exist where replicas run."""
    folder = os.path.expanduser(path)
    return os.path.realpath(folder) if os.path.isdir(folder) else path


def is_text(path: str) -> bool:
    """Whether a path can be written down; bytes of a file name that are no UTF-8 cannot."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
