"""Passwords and tokens appear in no file and on no screen; the compile cache is its user's alone."""

import json
import logging
import os

import jax
import pytest

from jaxtrain import TrainingConfig, config_io, redaction
from jaxtrain.runtime import compile_cache
from jaxtrain.train import run_dir
from jaxtrain.train.tracking.tracker import Tracker

SECRET = "hunter2hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://me:{SECRET}@db:5432/mlflow", f"http://me:a/{SECRET}@host", f"http://me:a@{SECRET}@host/x",
        f"https://{SECRET}@host/x", f"https://host/x?a=1&access_token={SECRET}&b=2", f"http://h/?X-Amz-Signature={SECRET}",
        f"hf_{SECRET}", f"ghp_{SECRET}", f"uri=sqlite://u:{SECRET}@/x and more", f"s3://k:{SECRET}@bucket",
        f"sk-proj-{SECRET}-12_3",
    ],
)  # fmt: skip
def test_a_secret_is_masked_and_the_rest_stays(text):
    masked = redaction.mask(text)
    assert SECRET not in masked
    assert redaction.MASK in masked


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8080/a@b", "https://github.com/user/repo@v1.2", "sqlite:///x/mlflow.db", "sklearn_datasets_load",
        "me@example.org", "task-sk-learn", "optim.lr=1e-3", "file:///a:b@c", "http://host:5000?x=1", "s3://bucket/key=1",
        "sk-learn-baseline-with-20-epochs", "/data/x?tokenizer=bert", "http://host/x?keyword=a",
    ],
)  # fmt: skip
def test_what_holds_no_secret_stays_as_it_is(text):
    assert redaction.mask(text) == text


def test_no_file_of_a_run_shows_a_password_that_a_script_put_into_its_config(tmp_path):
    config = TrainingConfig(tracking={"mlflow_uri": f"http://me:{SECRET}@host"}, run={"dir": str(tmp_path)})
    run_dir.write_start(tmp_path, config, 1)
    tracker = Tracker(tmp_path, config.model_copy(update={"tracking": TrainingConfig().tracking}), active=True)
    tracker.info(f"cannot reach http://me:{SECRET}@host")
    tracker.close()
    logging.getLogger("jaxtrain").handlers[0].flush()
    shown = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    assert f"http://me:{redaction.MASK}@host" in shown
    assert SECRET not in shown + json.dumps(config_io.plain(config))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    yield tmp_path / "xla"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("mode", [None, 0o755, 0o700])
def test_the_compile_cache_is_its_owners_alone(mode, cache):
    if mode is not None:
        cache.mkdir()
        cache.chmod(mode)
    assert compile_cache.enable() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_compile_cache_that_others_may_have_written_to_is_not_used(mode, cache, caplog):
    cache.mkdir()
    cache.chmod(mode)
    assert compile_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_a_compile_cache_of_another_user_is_not_used(cache, monkeypatch):
    cache.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert "belongs to user" in compile_cache._made_private(cache)
