"""Collects the families of models that can be converted from and to Hugging Face's format."""

from fairseq_tutel.convert.released.families import translation
from fairseq_tutel.convert.released.table import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (translation.M2M100,)}
