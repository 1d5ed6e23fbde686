"""Every public name has a docstring with an example that runs, and is on the site's API page."""

import inspect
import re

import pytest
from doc_examples import run_example
from pages import PAGES, ROOT, blocks

import fairseq_tutel as ft
from fairseq_tutel.option import options_in

API = (ROOT / "docs" / "site" / "api.md").read_text()
# from_checkpoint is tested in tests/e2e/test_hub.py; UpdateTuner needs several ranks.
ELSEWHERE = {"from_checkpoint", "UpdateTuner"}


@pytest.mark.parametrize("name", sorted({*ft.__all__} - ELSEWHERE))
def test_the_example_of_a_public_name_runs(name):
    run_example(name)


def test_the_example_for_several_ranks_runs(ranks):
    ranks(2).run(run_example, "UpdateTuner")


def test_the_api_page_has_every_public_name():
    for name in ft.__all__:
        assert re.search(rf"^\.\. auto(class|function):: {name}$", API, re.M), name


def test_the_api_page_has_every_name_that_other_pages_import():
    found = [
        f"{module}.{name.strip()}"
        for page in PAGES
        for block in blocks(page, "python")
        for module, names in re.findall(r"^from (fairseq_tutel\.\S+) import (.*)$", block.text, re.M)
        for name in names.split(",")
    ]
    assert len(found) > 2
    for name in found:
        assert re.search(rf"^\.\. auto(class|function):: {re.escape(name)}$", API, re.M), name


def test_the_configuration_s_docstring_has_each_field_with_unit_and_default():
    text = inspect.getdoc(ft.MoEConfig)
    assert "\nExample:\n    >>>" in text
    for option in options_in(ft.MoEConfig):
        assert f"\n    {option.name} ({option.type.__name__}): {option.text}" in text
    assert "[1.25]" not in text and "in tokens [0]" in text


def test_dir_lists_no_typing_helper():
    assert set(ft.__all__) <= set(dir(ft)) and not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(ft))
