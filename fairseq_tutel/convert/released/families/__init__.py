"""Collects the families of models that can be converted from and to Hugging Face's format."""

from fairseq_tutel.convert.released.families.language_models import OPT, XGLM
from fairseq_tutel.convert.released.families.masked import ROBERTA, XLM_ROBERTA
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE
from fairseq_tutel.convert.released.families.speech import HUBERT, WAV2VEC2
from fairseq_tutel.convert.released.families.translation import BART, FSMT, M2M100, MBART
from fairseq_tutel.convert.released.table import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (M2M100, NLLB_MOE, BART, MBART, XGLM, OPT, ROBERTA, XLM_ROBERTA, FSMT, WAV2VEC2, HUBERT)
}
