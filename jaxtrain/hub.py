"""Pretrained models by name: a local folder, or an id on the Hugging Face hub."""

import functools
import logging
import os
import pathlib
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence

from jaxtrain.errors import UserError

log = logging.getLogger(__name__)
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "spm.model", "sentencepiece*", "special_tokens_map.json")
TOKENIZER += ("added_tokens.json", "chat_template*")
SAFE = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER)
WITH_PICKLES = (*SAFE, "pytorch_model*")  # small models only: if a model has both formats, both are fetched


@functools.cache
def cache_only_if_unreachable(seconds: float = 5.0) -> None:
    """If the hub does not answer, warn and make huggingface_hub, transformers and datasets use only its cache, in this
    process and its children: else each file waits through half a minute of retries. Not checked behind a proxy."""
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    told = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if told or urllib.request.getproxies():
        return
    try:
        place = (address.hostname, address.port or (80 if address.scheme == "http" else 443))
        socket.create_connection(place, seconds).close()
    except OSError as error:
        log.warning("%s cannot be reached (%s): only what was downloaded before is found", address.hostname, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub" in sys.modules:  # it has already read the variable
            sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True


def folder_of(name: str, setting: str, files: Sequence[str] = SAFE) -> pathlib.Path:
    """Return a local folder as it is, or the folder of a hub id in huggingface_hub's cache, downloading it if needed.

    setting: the setting that holds the name, for messages. files: patterns of the files to fetch. Raises UserError if
    there is no such folder and the model cannot be fetched: no network, no such model, or a gated one.
    """
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{setting}: {name}: no such folder; wanted one with config.json, weights and tokenizer")
    cache_only_if_unreachable()
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise not_to_be_had(name, setting, f"{setting}=null starts from random weights", error) from None


def not_to_be_had(name: str, setting: str, without: str, error: Exception) -> UserError:
    """Return the error for a model that is no folder and cannot be fetched. without: how to do without a model."""
    reason = " ".join(str(error).split()[:40]) or type(error).__name__
    return UserError(
        f"{setting}: {name} is no local folder and cannot be fetched from the Hugging Face hub ({reason}). "
        f"Offline, download it elsewhere (`hf download {name} --local-dir DIR`) and set {setting}=DIR; {without}"
    )
