"""Fixtures with data for all end-to-end tests."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _logs(tmp_path_factory):
    os.environ["FAIRSEQ_TUTEL_TEST_LOGS"] = str(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def lm_data(tmp_path_factory):
    """A binarized language-model corpus."""
    from corpora import language

    return language(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def mt_data(tmp_path_factory):
    """A binarized translation corpus."""
    from corpora import translation

    return translation(tmp_path_factory.mktemp("mt"))
