"""The options of ensembles and of confident multiple choice learning."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.moe.options import AT_LEAST_1, NOT_NEGATIVE, option, whole

of_model = partial(option, of="model", theme="Ensembles")
of_criterion = partial(option, of="criterion", theme="Ensembles")


@dataclass(frozen=True)
class EnsembleConfig:
    """What an ensemble is, beside the options of its members."""

    ensemble_arch: str = of_model(
        "", "architecture of the members, whose own options are given beside"
    )
    ensemble_size: int = of_model(5, "members", rule=whole(2))
    ensemble_share_after: str = of_model(
        "",
        "a layer's name within a member, such as decoder.layers.0, whose output members give each other; "
        "empty for none",
    )
    ensemble_share_keep: float = of_model(
        0.7,
        "share of another member's features that one is given: drawn in training, the mean in evaluation",
        rule=(lambda v: 0 < v <= 1, "give a number above 0, at most 1"),
    )


@dataclass(frozen=True)
class CMCLConfig:
    """What members of an ensemble learn of a sample."""

    cmcl_overlap: int = of_criterion(
        4,
        "members that learn a sample, those that are best at it; as many as there are is an independent "
        "ensemble",
        rule=AT_LEAST_1,
    )
    cmcl_beta: float = of_criterion(
        0.75,
        "how much the others are to be unsure of it; 0 is multiple choice learning",
        rule=NOT_NEGATIVE,
    )
    cmcl_stochastic: bool = of_criterion(
        False, "teach the others a random label instead of the uniform distribution, its mean"
    )
    cmcl_teach_router: float = of_criterion(
        0.0,
        "of a model that is no ensemble: weight of the cross entropy by which the gate of its last MoE "
        "layer learns which expert alone is best at a token; takes a forward for each expert",
        rule=NOT_NEGATIVE,
    )
