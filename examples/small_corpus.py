"""Write a small German-English corpus from a toy grammar: FOLDER/train.de and FOLDER/train.en.

The corpus is an example of a user's two text files. Each German form has one English translation.
"""

import itertools
import random
import sys
from pathlib import Path

# Noun: German word, article, English word.
NOUNS = (
    *(("Hund", "m", "dog"), ("Mann", "m", "man"), ("Vogel", "m", "bird"), ("Lehrer", "m", "teacher")),
    *(("Frau", "f", "woman"), ("Katze", "f", "cat"), ("Maus", "f", "mouse"), ("Ärztin", "f", "doctor")),
    *(("Kind", "n", "child"), ("Pferd", "n", "horse"), ("Mädchen", "n", "girl"), ("Schaf", "n", "sheep")),
)
ADJECTIVES = (
    *(("klein", "small"), ("groß", "big"), ("alt", "old"), ("jung", "young"), ("müd", "tired")),
    *(("braun", "brown"), ("weiß", "white"), ("schwarz", "black"), ("freundlich", "friendly")),
)
VERBS = (
    *(("sieht", "sees"), ("hört", "hears"), ("sucht", "looks for"), ("findet", "finds")),
    *(("mag", "likes"), ("ruft", "calls"), ("fragt", "asks"), ("kennt", "knows")),
)
PLACES = (
    *(("im Garten", "in the garden"), ("am Fluss", "at the river"), ("auf der Straße", "on the street")),
    *(("hinter dem Haus", "behind the house"), ("im Wald", "in the forest"), ("", "")),
)
# Article and adjective ending, by case and gender.
SUBJECT = {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")}
OBJECT = {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")}
SENTENCES = 6000


def sentences() -> list[tuple[str, str]]:
    """Return pairs of a German and an English sentence; every call returns the same pairs."""
    random_numbers = random.Random(1)
    people = list(itertools.product(NOUNS, ADJECTIVES))
    pairs: dict[str, str] = {}
    while len(pairs) < SENTENCES:
        (subject, how), (other, how_other) = random_numbers.sample(people, 2)
        (verb, verb_en), (place, place_en) = random_numbers.choice(VERBS), random_numbers.choice(PLACES)
        article, ending = SUBJECT[subject[1]]
        article_other, ending_other = OBJECT[other[1]]
        german = [
            article,
            how[0] + ending,
            subject[0],
            verb,
            article_other,
            how_other[0] + ending_other,
            other[0],
        ]
        english = ["the", how[1], subject[2], verb_en, "the", how_other[1], other[2]]
        pairs[" ".join([*german, place]).strip() + "."] = " ".join([*english, place_en]).strip() + "."
    return list(pairs.items())


def main() -> None:
    """Write the two files into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, lines in zip(("de", "en"), zip(*sentences(), strict=True), strict=True):
        (folder / f"train.{suffix}").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
