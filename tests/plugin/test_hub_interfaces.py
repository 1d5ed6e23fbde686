"""What an interface is asked with something that is no text and no image is refused in one sentence."""

from types import SimpleNamespace

import pytest
from torch import nn

from fairseq_tutel import plugin

plugin.register()

from fairseq_tutel.plugin import hub_interfaces as hub  # noqa: E402 - needs fairseq's registries


@pytest.mark.parametrize(
    ("interface", "method"),
    [
        (hub.Translation, "translate"), (hub.LanguageModel, "sample"), (hub.LanguageModel, "score"),
        (hub.Denoising, "sample"), (hub.Denoising, "fill_mask"), (hub.MaskedLanguageModel, "fill_mask"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrong", [5, None, ["w1", 5]])
def test_what_is_no_text_is_refused(interface, method, wrong):
    unopened = interface.__new__(interface)  # the argument is checked before the model is used
    with pytest.raises(ValueError, match=r"^(sentences|masked_inputs?) (is|has) .*; give a text"):
        getattr(unopened, method)(wrong)


@pytest.mark.parametrize("wrong", [5, None, [5], [None]])
def test_what_is_no_image_is_refused(wrong):
    task = SimpleNamespace(
        channels=1, class_names=["a"], state=SimpleNamespace(images={"shape": (1, 8, 8)})
    )
    model = hub.ImageClassification(None, task, [nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"^images has (5|None); give a file, or an array of uint8"):
        model.classify(wrong)
