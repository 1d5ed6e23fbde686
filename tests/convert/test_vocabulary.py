"""The tests check scores, new rows, new languages and errors after `convert vocabulary`."""

import argparse

import pytest
import torch
from tool_in_process import convert, refusal

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.dictionaries import KEY, fingerprints_of
from fairseq_tutel.convert.configs import new_checkpoint
from fairseq_tutel.convert.vocabulary import fitted

SMALL = ("--cpu", "--dropout", 0, "--max-update", 1, "--optimizer", "adam", "--lr", 1)
EXPERTS = ("--moe-freq", 1, "--moe-expert-count", 2)
SIZES = [
    word
    for side in ("encoder", "decoder")
    for key, value in (("layers", 1), ("embed-dim", 8), ("ffn-embed-dim", 8), ("attention-heads", 2))
    for word in (f"--{side}-{key}", value)
]
ADAPTIVE = ("--adaptive-input", "--adaptive-input-cutoff", "8,16", "--adaptive-input-factor", 2)
ADAPTIVE += ("--adaptive-softmax-cutoff", "8,16", "--adaptive-softmax-factor", 2, "--decoder-output-dim", 8)
TIED = ("--tie-adaptive-weights", "--tie-adaptive-proj", "--decoder-input-dim", 8)
LM = (
    "--task", "moe_language_modeling", "--arch", "moe_transformer_lm", *EXPERTS, *SIZES[8:],
    "--decoder-input-dim", 8, "--decoder-output-dim", 8,
)  # fmt: skip
MT = ("--task", "moe_translation", "--arch", "moe_transformer", "-s", "de", "-t", "en", *SIZES, *EXPERTS)
SIMPLE = (
    "--task", "translation_multi_simple_epoch", "--arch", "transformer", *SIZES, "--share-all-embeddings",
    "--langs", "en,de", "--lang-pairs", "de-en,en-de", "--encoder-langtok", "src", "--decoder-langtok",
)  # fmt: skip
MODELS = {
    "tied LM": (*LM, "--share-decoder-input-output-embed"),
    "LM with adaptive softmax": (*LM, *ADAPTIVE),
    "LM with tied adaptive softmax": (*LM, *ADAPTIVE, *TIED),
    "two dictionaries": (*MT,),
    "one dictionary": (*MT, "--share-all-embeddings"),
    "sharded and quantized": (*MT, "--share-decoder-input-output-embed"),
    "a model for each pair": (
        "--task", "moe_multilingual_translation", "--arch", "moe_multilingual_transformer", *SIZES,
        "--lang-pairs", "de-en,en-de", *EXPERTS,
    ),
    "masked LM": ("--task", "masked_lm", "--arch", "roberta_base", *SIZES[:8]),
    "LSTM": ("--task", "translation", "--arch", "lstm", "-s", "de", "-t", "en"),
}  # fmt: skip
NUMBERS = range(20)


def write_dictionaries(folder, name="", numbers=NUMBERS):
    """Write the dictionaries of a monolingual text, and of the languages de and en; return the folder."""
    folder.mkdir(exist_ok=True)
    numbers = list(numbers)
    for file, prefix in (("dict.txt", "w"), ("dict.de.txt", "w"), ("dict.en.txt", name or "w")):
        (folder / file).write_text("".join(f"{prefix}{number} 1\n" for number in numbers))
    return folder


@pytest.fixture
def old(tmp_path):
    """Return a function that writes an untrained model to old.pt and returns the model's task."""

    def build(*words, name=""):
        from fairseq import options, tasks

        plugin.register()
        data, words = write_dictionaries(tmp_path / "old", name), list(map(str, (*words, *SMALL)))
        args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *words])
        task = tasks.setup_task(args)
        torch.manual_seed(1)
        model = task.build_model(argparse.Namespace(**vars(args)))
        saved = new_checkpoint(words, {"data": str(data)}, model.state_dict(), {})
        saved.state["extra_state"][KEY] = fingerprints_of(model)
        saved.restart()  # As in a converted checkpoint, training state goes and fingerprints stay.
        saved.write(tmp_path / "old.pt")
        return task

    return build


def scores(path, data, words=None):
    """Return the score of every symbol after a short input, and the words of the input."""
    from fairseq import checkpoint_utils

    overrides = {"data": str(data)}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides)
    found, read = {}, {}
    for name, part in dict(getattr(model, "models", {"": model})).items():
        sides = [getattr(part, side).dictionary for side in ("encoder", "decoder") if hasattr(part, side)]
        read[name] = words[name] if words else [d.symbols[6:15:2] for d in sides]
        read_by = zip(sides, read[name], strict=True)
        inputs = [torch.tensor([[d.index(word) for word in own]]) for d, own in read_by]
        inputs[1:1] = [torch.tensor([inputs[0].shape[1]])] * (len(sides) - 1)
        with torch.no_grad():
            lprobs = part.eval().get_normalized_probs(part(*inputs), log_probs=True)[0]
        # New symbols change the sum over the vocabulary, but not the differences of log-probabilities.
        relative = lprobs - lprobs[:, sides[-1].unk_index, None]
        found |= {f"{name} {symbol}": relative[:, i] for i, symbol in enumerate(sides[-1].symbols)}
    return found, read


def same_scores(before, after, size=None):
    kept = [symbol for symbol in before if symbol in after][:size]
    assert len(kept) >= 8
    for symbol in kept:
        torch.testing.assert_close(after[symbol], before[symbol], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_symbols_in_both_dictionaries_keep_their_scores(name, old, tmp_path):
    other = "v" if name == "two dictionaries" else ""
    old(*MODELS[name], name=other)
    source = tmp_path / "old.pt"
    if name == "sharded and quantized":
        source = tmp_path / "int8.pt"
        convert("sharded", tmp_path / "old.pt", "--output", source, "--expert-dtype", "int8")
    before, read = scores(source, tmp_path / "old")
    convert_to = ("vocabulary", source, "--output", tmp_path / "made" / "new.pt")
    (tmp_path / "made").mkdir()
    if "adaptive" not in name:
        numbers = [30, *reversed(range(2, 19)), *range(31, 35)]
        data = write_dictionaries(tmp_path / "new", other, numbers)
        convert(*convert_to, "--data", data)
        same_scores(before, scores(tmp_path / "made" / "new.pt", data, read)[0])
    else:
        data = write_dictionaries(tmp_path / "new", other, reversed(NUMBERS))
        assert "new symbols must follow the old ones" in refusal(*convert_to, "--data", data)
        (tmp_path / "words").write_text("more\nw3\nother 7\n")
        convert(*convert_to, "--add-words", tmp_path / "words")
        after, _ = scores(tmp_path / "made" / "new.pt", tmp_path / "made", read)
        assert {" more", " other"} <= after.keys()
        same_scores(before, after, size=8)  # New words are in the last band of the softmax.


def test_the_row_of_a_new_symbol_is_a_mean_of_old_rows():
    table = torch.arange(12.0).view(4, 3)
    examples = {"_z_": ["_x_", "_y_"], "_v_": ["_y_"]}
    old, new = ["<pad>", "a", "_x_", "_y_"], ["b", "_z_", "a", "_v_"]
    expected = [(table[1] + table[3]) / 2, table[2:].mean(0), table[1], table[3]]
    assert torch.equal(fitted(table, old, new, examples, {"<pad>", "_x_"}), torch.stack(expected))


STYLES = {"multilingual": "__{}__", "mbart": "[{}]"}


@pytest.mark.parametrize("style", STYLES)
def test_the_token_of_a_new_language_follows_the_tokens_of_the_old_languages(style, old, tmp_path):
    form = STYLES[style].format
    task = old(*SIMPLE, "--lang-tok-style", style, "--fixed-dictionary", tmp_path / "old" / "dict.txt")
    symbols = task.source_dictionary.index
    rows = torch.load(tmp_path / "old.pt")["model"]["encoder.embed_tokens.weight"]
    en, de = rows[symbols(form("en"))], rows[symbols(form("de"))]
    for like, expected in (((), (en + de) / 2), (("--like", "de"), de)):
        folder = tmp_path / f"made{len(like)}"
        folder.mkdir()
        words = ("--output", folder / "new.pt", "--add-languages", "fr", *like)
        text = convert("vocabulary", tmp_path / "old.pt", *words)
        assert "--finetune-from-model and --langs en,de,fr" in text
        state = torch.load(folder / "new.pt")
        made = state["model"]["encoder.embed_tokens.weight"]
        index = symbols(form("de")) + 1
        assert torch.equal(made[index], expected) and torch.equal(made[:index], rows[:index])
        assert torch.equal(made[index + 1 :], rows[index:])  # The row of <mask> follows.
        assert state["cfg"]["task"].langs == ["en", "de", "fr"]
        assert {file.name for file in folder.glob("dict.*.txt")} >= {"dict.de.txt", "dict.fr.txt"}
        assert state["model"]["decoder.output_projection.weight"].data_ptr() == made.data_ptr()


BAD = {
    "no new dictionary": (MT, (), "no new dictionary is given"),
    "a language that is known": (SIMPLE, ("--add-languages", "de"), "--add-languages is de, but the task"),
    "a task without languages": (MT, ("--add-languages", "fr"), "has the --langs none"),
    "an example that is unknown": (SIMPLE, ("--add-languages", "fr", "--like", "nl"), "--like is nl"),
    "an example without a language": (SIMPLE, ("--data", "new", "--like", "de"), "--like is de"),
    "other old words": (MT, ("--data", "new", "--old-data", "new"), "does not have 34 rows"),
    "old words in another order": (MT, ("--data", "new", "--old-data", "other"), "another dictionary"),
}


@pytest.mark.parametrize("name", BAD)
def test_convert_vocabulary_rejects_bad_input_with_a_one_sentence_error(name, old, tmp_path, monkeypatch):
    model, words, expected = BAD[name]
    monkeypatch.chdir(tmp_path)
    old(*model)
    write_dictionaries(tmp_path / "new", numbers=range(30))
    write_dictionaries(tmp_path / "other", numbers=reversed(NUMBERS))
    assert expected in refusal("vocabulary", "old.pt", "--output", "new.pt", *words)
    assert not (tmp_path / "new.pt").exists()
