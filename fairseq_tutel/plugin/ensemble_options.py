"""The options of ensembles and of confident multiple choice learning."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.option import AT_LEAST_1, NOT_NEGATIVE, option, whole

of_model = partial(option, of="model", theme="Ensembles")
of_criterion = partial(option, of="criterion", theme="Ensembles")


@dataclass(frozen=True)
class EnsembleConfig:
    """The options of an ensemble, without the options of the ensemble's members."""

    ensemble_arch: str = of_model("", "architecture of the members; its flags are accepted, too")
    ensemble_size: int = of_model(5, "number of members", rule=whole(2))
    ensemble_share_after: str = of_model(
        "",
        "name of a layer, such as decoder.layers.0, at whose output the members share features; empty: no "
        "shared features",
    )
    ensemble_share_keep: float = of_model(
        0.7,
        "fraction of the other members' features that is added to a member's features: a random mask in "
        "training, a constant factor in evaluation",
        rule=(lambda v: 0 < v <= 1, "give a number above 0, at most 1"),
    )


@dataclass(frozen=True)
class CMCLConfig:
    """The options of confident multiple choice learning (CMCL)."""

    cmcl_overlap: int = of_criterion(
        4,
        "number of members (those with the lowest loss) that learn each sample",
        rule=AT_LEAST_1,
    )
    cmcl_beta: float = of_criterion(
        0.75,
        "weight of the loss of members that do not learn a sample: the divergence of their prediction "
        "from the uniform distribution; 0: multiple choice learning without this loss",
        rule=NOT_NEGATIVE,
    )
    cmcl_stochastic: bool = of_criterion(
        False, "train members that do not learn a sample on a random label, not on the uniform distribution"
    )
