"""The classes of keyspace events, and the letters by which Redis' setting `notify-keyspace-events` names them."""

from __future__ import annotations

# The classes of events by their letters; A stands for all but K, E, m and n, as in Redis.
ALL_CLASSES = "g$lshzxetd"
CLASSES = {letter: 1 << number for number, letter in enumerate(ALL_CLASSES + "KEmn")}
TO_KEYSPACE, TO_KEYEVENT = CLASSES["K"], CLASSES["E"]
ALL = sum(CLASSES[letter] for letter in ALL_CLASSES)


class ClassesError(ValueError):
    """Raised for a letter that is no class of events; the text is that of Redis."""


def classes_of(letters: str) -> int:
    """Return the classes of letters; ClassesError for an unknown one."""
    found = 0
    for letter in letters:
        if letter != "A" and letter not in CLASSES:
            raise ClassesError("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
        found |= ALL if letter == "A" else CLASSES[letter]
    return found


def letters_of(classes: int) -> str:
    """Return the letters of classes; `classes_of` reads them."""
    return "".join(letter for letter, each in CLASSES.items() if classes & each)


def config_letters(letters: str) -> str:
    """Return the letters of classes as CONFIG GET shows them; `A` includes `n`."""
    classes = classes_of(letters)
    has_all = classes & ALL == ALL
    first = "A" if has_all else "".join(each for each in ALL_CLASSES + "n" if classes & CLASSES[each])
    return first + "".join(each for each in "KEm" if classes & CLASSES[each])
