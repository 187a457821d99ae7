"""Trainers log to MLflow once a test has imported it; their runs belong in a folder of the tests."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _mlflow_in_a_folder_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")
        yield
