"""Where the base model's files are: the demo model, a local folder, or a download from the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from cluster.demo.base_model import DemoModelError, Report, prepare
from cluster.schema import DEMO_MODEL
from lora_core.errors import ConfigError

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""What is fetched of a Hub repository: configuration, safetensors, tokenizer, chat template. Never pickled weights."""


def locate_base_model(model: str, report: Report = print) -> Path:
    """Return the folder of the base model on this machine, preparing or downloading it first where needed.

    Args:
        model: `demo`, a folder, or a Hub id `org/name`, `org/name@revision`. `HF_TOKEN` and `HF_HUB_OFFLINE` are
            honoured.
        report: Receives a line for each slow step.

    Raises:
        ConfigError: there is no such folder or repository, or the demo model could not be prepared.
    """
    if model == DEMO_MODEL:
        try:
            return prepare(report=report)
        except DemoModelError as error:
            raise ConfigError(f"model: {error}") from None
    folder = resolve_path(model)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: {folder} has no config.json; expected a Hugging Face model folder")
        return folder
    repo, _, revision = model.partition("@")
    report(f"looking for {model} on the Hugging Face Hub ...")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=MODEL_FILES))
    except HFValidationError:
        raise ConfigError(
            f"model: {model!r} is neither {DEMO_MODEL!r}, nor a folder, nor a Hub id (org/name)"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model: {model!r} is no folder here, and could not be fetched from the Hub: {error}"
        ) from None


def resolve_path(path: str) -> Path | None:
    """Find a folder named in a configuration, as it stands or relative to this project; None where there is none."""
    project = Path(__file__).resolve().parent.parent
    for folder in (Path(path).expanduser(), project / path):
        if folder.is_dir():
            return folder.resolve()
    return None
