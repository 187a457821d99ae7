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
WITH_PICKLES = (*SAFE, "pytorch_model*")  # small models only: where a model has both, both are fetched


@functools.cache
def cache_only_if_unreachable(seconds: float = 5.0) -> None:
    """Where the hub does not answer, say so and let huggingface_hub, transformers and datasets ask its cache alone, for
    this process and those it starts: else each file waits through half a minute of retries. A proxy is trusted."""
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
        if "huggingface_hub" in sys.modules:  # has read the variable
            sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True


def folder_of(name: str, setting: str, files: Sequence[str] = SAFE) -> pathlib.Path:
    """A local folder as it is; a hub id from huggingface_hub's cache, or downloaded into it.

    setting: what the name was given in, for messages. files: patterns of what is fetched. Raises UserError where
    neither is there: no such folder, no network, no such model, a gated one.
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
    """The error for a model that is neither a folder nor on the hub. without: the setting that needs no model."""
    reason = " ".join(str(error).split()[:40]) or type(error).__name__
    return UserError(
        f"{setting}: {name} is no local folder and cannot be fetched from the Hugging Face hub ({reason}). "
        f"Offline, download it elsewhere (`hf download {name} --local-dir DIR`) and set {setting}=DIR; {without}"
    )
