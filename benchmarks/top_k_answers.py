"""How much of the distillation loss remains when a teacher's answer is its K most likely words.

    python -m benchmarks.top_k_answers DATA_BIN TEACHER.pt STUDENT.pt

Both language models score the validation text. Each cell says by how many percent `--distill-top-k K` at
temperature T lowers the loss of the full answer.
"""

import sys

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data.data_utils import batch_by_size

from fairseq_tutel.distillation.loss import distillation_loss, top_answers
from fairseq_tutel.plugin import register

TOP_KS, TEMPERATURES, MAX_TOKENS = (8, 16, 32, 64), (1.0, 2.0), 4096


def main(data: str, teacher: str, student: str) -> None:
    """Print the vocabulary's size and the table."""
    register()
    (learned,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [student], arg_overrides={"data": data}
    )
    (taught,), _, _ = checkpoint_utils.load_model_ensemble_and_task([teacher], arg_overrides={"data": data})
    print(f"{len(task.target_dictionary)} words")
    task.load_dataset("valid")
    losses = _losses(task.dataset("valid"), learned.eval(), taught.eval())
    print("| K |", " | ".join(f"T = {t:g}" for t in TEMPERATURES), "|")
    for k in TOP_KS:
        left_out = (1 - losses[k, t] / losses[0, t] for t in TEMPERATURES)
        print(f"| {k} |", " | ".join(f"{100 * share:.1f} %" for share in left_out), "|")


@torch.no_grad()
def _losses(dataset, student, teacher) -> dict[tuple[int, float], float]:
    """Return the summed losses by (K, T); K = 0 is the full answer."""
    losses = dict.fromkeys([(k, t) for k in (0, *TOP_KS) for t in TEMPERATURES], 0.0)
    order = dataset.ordered_indices()
    for rows in batch_by_size(order, dataset.num_tokens, max_tokens=MAX_TOKENS):
        batch = dataset.collater([dataset[i] for i in rows])
        real = batch["target"].flatten() != dataset.vocab.pad()
        student_NV, teacher_NV = (
            model(**batch["net_input"])[0].flatten(0, 1) for model in (student, teacher)
        )
        for k, t in losses:
            answers = top_answers(teacher_NV, k, t) if k else teacher_NV
            losses[k, t] += utils.item(distillation_loss(student_NV, answers, real, t))
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
