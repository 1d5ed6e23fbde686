"""Settings for the tests that run the commands and Python blocks of README.md and docs/."""

# For each page: the first words of each command that is not run, and the reason.
NOT_RUN = {
    "README.md": {
        "make setup": "installs; the continuous integration runs it",
        "examples/quickstart.sh": "minutes; tests/repository/test_quickstart.py",
        "source .venv": "installs",
        "python3 -m venv": "installs",
        "pip install torch": "installs",
        "pip install --no-build-isolation": "installs",
    },
    "docs/checkpoints.md": {
        "fairseq-tutel convert meta": "needs files of Meta's branch; tests/e2e/test_convert.py",
        "fairseq-tutel convert tutel": "needs files of Tutel; tests/e2e/test_convert.py",
        "torchrun --nproc_per_node 8 --signals-to-handle": "tests/e2e/test_preemption.py",
        "srun": "Slurm",
        "trap": "Slurm",
        "wait": "Slurm",
    },
    "docs/daily_use.md": {
        "fairseq-train TRAIN --fp16": "GPU",
    },
    "docs/failures.md": {
        "export": "for the next command",
        "torchrun --nnodes": "several machines; tests/e2e/test_elastic.py",
        "python -c": "runs until it is stopped; tests/e2e/test_elastic.py",
        "sbatch": "Slurm",
    },
    "docs/parallelism.md": {"torchrun --nnodes 4": "several machines", "srun": "Slurm"},
    "docs/performance.md": {
        "bash benchmarks/gpu.sh": "GPU",
    },
    "docs/inference.md": {
        "fairseq-interactive": "variables; tests/e2e/test_released_experts.py",
    },
    "docs/released.md": {
        "LANGUAGES=": "variables; tests/e2e/test_released.py",
        "TASK=": "variables; tests/e2e/test_released.py",
        "fairseq-interactive": "variables; tests/e2e/test_released.py",
    },
    "docs/report.md": {"pip install": "installs"},
    "docs/results.md": {
        "examples/language_model.sh": "minutes, and a corpus",
        "STUDIES=language_model": "hours, and a corpus",
        "STUDIES=translation": "hours, and a corpus",
    },
    "docs/vision.md": {
        "pip install": "installs",
        "make vision-data": "downloads; the test draws images",
        "ls swin_moe": "released weights",
        "fairseq-tutel convert swin": "released weights; tests/convert/test_convert_swin.py",
        "make vision": "minutes",
        "examples/vision.sh": "hours",
    },
}  # fmt: skip
# The programs that commands on the pages may start.
PROGRAMS = {
    "cat", "fairseq-eval-lm", "fairseq-generate", "fairseq-hydra-train", "fairseq-preprocess",
    "fairseq-score", "fairseq-train", "fairseq-tutel", "fairseq-validate", "grep", "mkdir", "python",
    "torchrun",
}  # fmt: skip

# For each page: texts in commands, and the replacements for the tests.
EDITS = {
    "README.md": [("--beam 5", "--beam 1 --max-len-b 5"), ("Hund\")", "Hund\", beam=1, max_len_b=5)")],
    "docs/checkpoints.md": [
        ("--moe-checkpoint sharded", "--moe-checkpoint sharded --save-dir checkpoints"),
        ("from-model MOE.pt", "from-model MOE.pt --log-format json --log-file SAVE_DIR/train.log"),
    ],
    "docs/daily_use.md": [
        ("average SAVE", "average --overwrite SAVE"),
        ("--eval-bleu", "--eval-bleu --eval-bleu-args '{\"beam\": 1}'"),
    ],
    "docs/flags.md": [("[WORD]", "capacity")],
    "docs/parallelism.md": [
        ("--nproc_per_node 4", "--nproc_per_node 2"),
        ("--moe-expert-parallel-size 4", "--moe-expert-parallel-size 2"),
    ],
    "docs/report.md": [("ein kleiner Hund", "w1 w2"), ("eine große Katze", "w3")],
}  # fmt: skip
# For each page: file names in commands, and the files of the fixture `shelf` that replace these names.
FILES = {
    "docs/checkpoints.md": {"SAVE": "mt", "SAVE_DIR": "nothing", "DENSE.pt": "dense/checkpoint_best.pt"},
    "docs/daily_use.md": {
        "SAVE": "mt", "OLD": "plain", "LM": "lm", "LM_A.pt": "lm/checkpoint_best.pt",
        "LM_B.pt": "lm/checkpoint_last.pt", "A.pt": "plain/checkpoint_best.pt",
        "B.pt": "plain/checkpoint_last.pt", "SYSTEM.txt": "test.en", "REFERENCE.txt": "test.en",
        "bpe.model": "bpe.model", "lines.de": "test.en", "prompts.txt": "test.en", "lines.txt": "test.en",
    },
    "docs/ensembles.md": {"TEACHER.pt": "teacher/checkpoint_best.pt"},
    "docs/inference.md": {
        "SAVE": "mt", "CONVENTIONAL.pt": "plain/checkpoint_best.pt", "nllb-moe-54b": "released/moe",
    },
    "docs/parallelism.md": {
        "LM.pt": "lm/checkpoint_best.pt", "A.pt": "plain/checkpoint_best.pt",
        "B.pt": "plain/checkpoint_last.pt",
    },
    "docs/python.md": {
        "SAVE": "mt sharded", "LM": "lm", "text/bpe.model": "bpe.model", "LM_BIN": "DATA_BIN",
    },
    "docs/released.md": {
        "nllb-200-distilled-600M": "released/nllb", "nllb-moe-54b": "released/moe",
        "experts.json": "experts.json", "roberta": "ours-roberta",
        "checkpoints/checkpoint_best.pt": "ours-nllb/model.pt",
    },
    "docs/report.md": {"DATA_BIN": "pairs", "SAVE": "several", "runs/dense": "several", "runs/moe": "mt"},
    "docs/tutel.md": {"states": "nothing"},
    "docs/vision.md": {"vision": "vision"},
}  # fmt: skip
INIT = "import torch.distributed as dist; dist.init_process_group('gloo')"
# For each page whose Python blocks need several ranks: the launcher, and replacements in the code.
PYTHON = {
    "docs/parallelism.md": (
        ["torchrun", "--nproc_per_node", "4"],
        [
            ('"nccl"', '"gloo"'),
            ("ranks_per_node=8", "ranks_per_node=2"),
            (".cuda()", ""),
            ("import torch.d", "import torch\nimport torch.d"),
            ("in batches", "in torch.randn(3, 10, 512)"),
        ],
    ),
    "docs/tutel.md": (
        ["torchrun", "--nproc_per_node", "2"],
        [
            ("import torch\n", f"import torch\n{INIT}\n"),
            ("from fairseq_tutel.parallel.grad", "model = layer\nfrom fairseq_tutel.parallel.grad"),
            ("name = f", "rank, size = dist.get_rank(), dist.get_world_size()\nname = f"),
        ],
    ),
}  # fmt: skip

# Flags for small models, which the tests add after --arch, so that later flags of a page override them.
LM_SIZES = """
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16
    --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
"""
MT_SIZES = """
    --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
    --share-all-embeddings
"""
HYDRA_SMALL = ["optimization.max_update=2", "dataset.required_batch_size_multiple=1"]
SMALL = ["--num-workers", "0", "--required-batch-size-multiple", "1"]
UPDATES = {"docs/ensembles.md": ["--max-epoch", "1"]}
TWO_UPDATES = ["--max-update", "2"]
# The test replaces the word TRAIN in a command by this text, and `…` by flags that are not in the command.
TRAIN = "DATA_BIN --user-dir user_dir --arch moe_… …"
LM_FLAGS = {
    "--task": "moe_language_modeling", "--arch": "moe_transformer_lm_gpt", "--optimizer": "moe_adam",
    "--criterion": "moe_cross_entropy", "--lr": "0.01", "--tokens-per-sample": "16", "--batch-size": "4",
}  # fmt: skip
MT_FLAGS = {
    "--task": "moe_translation", "--arch": "moe_transformer_iwslt_de_en", "--optimizer": "moe_adam",
    "--criterion": "moe_label_smoothed_cross_entropy", "--lr": "0.01", "--max-tokens": "400",
}  # fmt: skip
# Flags of a run that keeps several checkpoints, because commands on the pages average them.
KEPT = "--save-interval-updates 2 --keep-best-checkpoints 5 --max-tokens 400 --max-epoch 9 --store-ema"
STOCK = "--task translation --criterion label_smoothed_cross_entropy --optimizer adam"
MOE_FLAGS = {"--moe-freq": "1", "--moe-expert-count": "4"}
RANKS = {"fairseq_tutel.train", "fairseq_tutel.run"}
