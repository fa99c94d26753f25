"""The declaration of a state: its name, the format of its keys, and the columns that feed it.

A user writes a `StateDescriptor` for each state. The Spark hooks read the columns that it names, each term of the log
stores it, and `STATE DESCRIBE` shows it. Nothing here imports Spark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict, TypeVar

from state_backend.model.errors import DescriptorError

NAME_PATTERN = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff:{}/\\<>]+")
NAME_BYTES_MAX = 200
# The longest list in the order of its rows: the orders of its elements are one value, which each change rewrites.
ORDERED_LENGTH_MAX = 10_000
PLACEHOLDER = re.compile(r"<([^<>]+)>")


Choice = TypeVar("Choice", bound=StrEnum)


class Kind(StrEnum):
    """The kind of a state's values; in Redis: string, hash, list, set and sorted set."""

    VALUE = "value"
    MAP = "map"
    LIST = "list"
    SET = "set"
    SORTED_SET = "sorted-set"


class Encoding(StrEnum):
    """How a value is written: as text, as JSON, or as the bytes of a binary column."""

    TEXT = "text"
    JSON = "json"
    BINARY = "binary"


class JsonDecimals(StrEnum):
    """How decimals are written in JSON: as numbers, of which many readers keep 15 digits, or as text."""

    NUMBER = "number"
    TEXT = "text"


class Reduce(StrEnum):
    """How a reducing state folds the rows of a micro-batch into its values."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    COUNT = "count"
    LAST = "last"


class By(StrEnum):
    """Which row of a key a state keeps, of all rows of all micro-batches, by the columns that this argument names."""

    LAST = "last_by"
    FIRST = "first_by"
    MAX = "max_by"
    MIN = "min_by"


class Late(StrEnum):
    """The effect of a row that comes before the last element of a list that is kept in the order of its rows."""

    INSERT = "insert"
    DROP = "drop"


def check_name(noun: str, name: object) -> str:
    """Return a name that can be part of a key and of a path; DescriptorError for any other.

    Args:
        noun: `job` or `state`.
    """
    if not isinstance(name, str) or not name:
        raise DescriptorError(f"the {noun} name must be a non-empty string, not {name!r}")
    size = len(name.encode("utf-8", "replace"))
    if size > NAME_BYTES_MAX:
        raise DescriptorError(f"the {noun} name {name[:20]!r}... has {size} bytes in UTF-8; at most {NAME_BYTES_MAX}")
    if not NAME_PATTERN.fullmatch(name) or name.startswith("."):
        raise DescriptorError(
            f"the {noun} name {name!r} may not contain white space or any of : {{ }} / \\ < >, nor start with a dot, "
            f"because it is part of Redis keys and folder names; choose another name"
        )
    return name


def feed_key(job: str) -> str:
    """Return the key of a job's change feed; that of one state has a colon and the state's name after it."""
    return f"{job}:_changes"


def check_user_name(name: object) -> str:
    """Return a state name that a user may declare; DescriptorError for one of sparkis' own, which begin with `_`."""
    if isinstance(name, str) and name.startswith("_"):
        raise DescriptorError(f"the state name {name!r} begins with _, as sparkis' own states do; choose another name")
    return check_name("state", name)


@dataclass(frozen=True)
class KeyFormat:
    """A Redis key as literal texts around column placeholders: `literals[0] <columns[0]> literals[1] ...`.

    There is one literal more than there are columns. Only the first and the last literal may be empty: otherwise
    different rows could make the same key. A format without columns is for a state with a single key.
    """

    literals: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> KeyFormat:
        """Parse a text such as `plane/<tailnum>`; DescriptorError if there is nothing between two placeholders."""
        parts = PLACEHOLDER.split(text)
        parsed = cls(tuple(parts[::2]), tuple(parts[1::2]))
        parsed._check(text)
        return parsed

    @classmethod
    def default(cls, job: str, state: str, columns: Sequence[str], separator: str) -> KeyFormat:
        """Return `job:state:<a><separator><b>...`."""
        literals = (f"{job}:{state}:", *([separator] * (len(columns) - 1)), "")
        default = cls(literals, tuple(columns))
        default._check(default.text)
        if cls.parse(default.text) != default:
            raise DescriptorError(
                f"the key format {default.text!r} cannot be parsed; a column or separator with < or > in it cannot "
                f"make keys: rename the column, or use another separator"
            )
        return default

    def _check(self, text: str) -> None:
        if any(not literal for literal in self.literals[1:-1]):
            raise DescriptorError(
                f"the key format {text!r} has nothing between two columns, so that different rows could make one key; "
                f"put a separator between them"
            )

    @property
    def prefix(self) -> bytes:
        """The text before the first column: all keys begin with it. Without columns it is the whole key."""
        return self.literals[0].encode()

    @property
    def suffix(self) -> bytes:
        """The text after the last column: all keys end with it."""
        return self.literals[-1].encode()

    @property
    def text(self) -> str:
        """The format as text, the inverse of `parse`."""
        columns = [f"<{column}>" for column in self.columns] + [""]
        return "".join(literal + column for literal, column in zip(self.literals, columns, strict=True))

    def overlaps(self, other: KeyFormat) -> bool:
        """Return whether both formats could make the same key: they can if their prefixes and suffixes agree."""
        mine, theirs = self.literals, other.literals
        if not self.columns:
            return bool(re.match(other.pattern(), mine[0].encode(), re.DOTALL))
        if not other.columns:
            return other.overlaps(self)
        prefixes_agree = mine[0].startswith(theirs[0]) or theirs[0].startswith(mine[0])
        suffixes_agree = mine[-1].endswith(theirs[-1]) or theirs[-1].endswith(mine[-1])
        return prefixes_agree and suffixes_agree

    def pattern(self) -> bytes:
        """Return a regular expression (bytes, DOTALL, from the key's start) that every key of this format matches."""
        if not self.columns:
            return re.escape(self.prefix) + rb"\Z"
        return re.escape(self.prefix) + (b".*" + re.escape(self.suffix) + rb"\Z" if self.suffix else b"")


class StateArguments(TypedDict, total=False):
    """The arguments of `StateDescriptor` except the name, for functions that pass them on."""

    key: str | Sequence[str]
    value: str | Sequence[str]
    key_format: str | None
    separator: str
    field: str | None
    member: str | None
    score: str | None
    kind: Kind | str | None
    ttl: timedelta | float | None
    expire_at: str | None
    encoding: Encoding | str | None
    json_decimals: JsonDecimals | str
    time_format: str | None
    deletion: str | None
    resets: str | None
    order_by: str | Sequence[str]
    duplicates: str
    where: str | None
    length_max: int | None
    reduce: Reduce | str | None
    last_by: str | Sequence[str]
    first_by: str | Sequence[str]
    max_by: str | Sequence[str]
    min_by: str | Sequence[str]
    late: Late | str


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, init=False)
class StateDescriptor:
    """One state: its name, how its keys are made, and which columns of a DataFrame feed it.

    Each row of the DataFrame is one change of one key. The kind of the state follows from the columns.

    Args:
        name: The state's name. With the job's it begins the default key, `job:name:<key>`.
        key: The column, or columns, that make the key. Here and below a column may be a field of a struct, such as
            `window.start`.
        value: The column, or columns, of the value. Several columns make a hash whose fields have their names; with
            `field` or another `kind` they make one JSON object.
        key_format: In place of `key`: any text with `<column>` placeholders, such as `plane/<tailnum>`.
        separator: The text between several columns of the key.
        field: For a hash with one field per row: the column that names the field.
        member: In place of `value`, for a set with one member per row: the column of the member.
        score: With `member`, for a sorted set: the column of the score, a number. Null removes the member.
        kind: `value`, `map`, `list`, `set` or `sorted-set`. It follows from the columns, except for a list, which has
            to be named: its rows are appended in their order, and an array column replaces the list.
        ttl: How long a key lives after its last change (with `field`: a field), as a timedelta or in seconds.
        expire_at: In place of `ttl`: the column with the time at which the row's key or field expires, a timestamp or
            milliseconds since 1970 UTC. Null: never. A set expires as a whole: the last row in order decides.
        encoding: `text`, `json`, or `binary`, which takes the bytes of a binary column as they are. Default: `text`,
            or `json` where several columns are one value.
        json_decimals: `number`, or `text`: decimals in JSON are texts. Many readers of JSON, such as JavaScript, keep
            only some 15 digits of a number.
        time_format: The pattern (Spark's, such as `yyyy-MM-dd HH:mm`) of dates and timestamps in the key, the field,
            the member and the value, in UTC. Default: ISO 8601.
        deletion: The boolean column that is true in rows that delete. A null value deletes as well.
        resets: For a list: the boolean column that is true where the list is emptied before the row's element is
            appended.
        order_by: The column, or columns, that order the rows of one key within a micro-batch; the last row wins. A
            later micro-batch always wins: for late rows give `last_by`.
        duplicates: `error`, or `any`: either of two unordered rows of one key may win.
        where: An SQL condition: only rows that meet it feed this state.
        length_max: For a list: how many of its last elements are kept.
        reduce: `sum`, `min`, `max`, `count` or `last`: the rows of a key are folded into its value, once per
            micro-batch.
        last_by: The column, or columns, that order the rows of one key over all micro-batches: the state keeps the
            value of the greatest row, so late rows change nothing. Of equal rows the later one wins. Readers see the
            value only. A row with a null value is left out. With `kind="list"` the list is in this order, and
            `length_max` keeps its last elements.
        first_by: As `last_by`, for the least row and the first elements; of equal rows the earlier one stays.
        max_by: As `last_by`, but of equal rows the earlier one stays.
        min_by: Another name of `first_by`, for columns that are not times.
        late: For a list with `last_by`, `first_by`, `max_by` or `min_by`: `insert` puts a late row at its place,
            `drop` leaves it out.
        columns: The types of the columns; sparkis fills them in.

    Raises:
        DescriptorError: The arguments contradict each other, or a name cannot be in a key.

    Examples:
        A string, and with several columns a hash:

        >>> sparkis.StateDescriptor("temperature", key="sensor", value="temp").kind
        <Kind.VALUE: 'value'>
        >>> sparkis.StateDescriptor("carriers", key="carrier", value=["flights", "cancelled"]).kind
        <Kind.MAP: 'map'>

        A hash with one field per row, and a time to live for each field:

        >>> sparkis.StateDescriptor("byDay", key=["origin", "dest"], field="date", value="delay", ttl=86_400).kind
        <Kind.MAP: 'map'>

        A window of a streaming aggregation as the field, and two values in it as a JSON object:

        >>> sparkis.StateDescriptor("ranges", key="symbol", field="window.start", value=["low", "high"]).encoding
        <Encoding.JSON: 'json'>

        A list of the last ten:

        >>> sparkis.StateDescriptor("recent", key="sensor", value="temp", kind="list", length_max=10).kind
        <Kind.LIST: 'list'>

        A set, and a leaderboard:

        >>> sparkis.StateDescriptor("online", key="game", member="player").kind
        <Kind.SET: 'set'>
        >>> sparkis.StateDescriptor("top", key="day", member="player", score="points").kind
        <Kind.SORTED_SET: 'sorted-set'>

        The last value by time, however late its row comes, and the last ten in the order of their times:

        >>> sparkis.StateDescriptor("latest", key="sensor", value="temp", last_by="time").by
        <By.LAST: 'last_by'>
        >>> last = sparkis.StateDescriptor("last", "sensor", "temp", kind="list", last_by="time", length_max=10)
        >>> last.late
        <Late.INSERT: 'insert'>

        A key of one's own, and a sum that needs no state in the query:

        >>> sparkis.StateDescriptor("miles", key_format="plane/<tailnum>", value="distance", reduce="sum").reduce
        <Reduce.SUM: 'sum'>
    """

    name: str
    key: tuple[str, ...]
    value: tuple[str, ...]
    key_format: str | None
    separator: str
    field: str | None
    member: str | None
    score: str | None
    kind: Kind
    ttl: timedelta | None
    expire_at: str | None
    encoding: Encoding
    json_decimals: JsonDecimals
    time_format: str | None
    deletion: str | None
    resets: str | None
    order_by: tuple[str, ...]
    duplicates: str
    where: str | None
    length_max: int | None
    reduce: Reduce | None
    last_by: tuple[str, ...]
    first_by: tuple[str, ...]
    max_by: tuple[str, ...]
    min_by: tuple[str, ...]
    late: Late
    columns: Mapping[str, str]

    def __init__(
        self,
        name: str,
        key: str | Sequence[str] = (),
        value: str | Sequence[str] = (),
        *,
        key_format: str | None = None,
        separator: str = ":",
        field: str | None = None,
        member: str | None = None,
        score: str | None = None,
        kind: Kind | str | None = None,
        ttl: timedelta | float | None = None,
        expire_at: str | None = None,
        encoding: Encoding | str | None = None,
        json_decimals: JsonDecimals | str = JsonDecimals.NUMBER,
        time_format: str | None = None,
        deletion: str | None = None,
        resets: str | None = None,
        order_by: str | Sequence[str] = (),
        duplicates: str = "error",
        where: str | None = None,
        length_max: int | None = None,
        reduce: Reduce | str | None = None,
        last_by: str | Sequence[str] = (),
        first_by: str | Sequence[str] = (),
        max_by: str | Sequence[str] = (),
        min_by: str | Sequence[str] = (),
        late: Late | str = Late.INSERT,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        # The class is frozen: its fields are set only here.
        put = partial(object.__setattr__, self)
        put("name", check_name("state", name))
        put("key", self._column_names("key", key))
        put("value", self._column_names("value", value))
        put("key_format", key_format)
        put("separator", separator)
        put("field", field)
        put("member", member)
        put("score", score)
        put("kind", self._implied_kind() if kind is None else self._choice("kind", kind, Kind))
        put("ttl", self._lifetime(ttl))
        put("expire_at", expire_at)
        put("encoding", self._choice("encoding", encoding or self._implied_encoding(), Encoding))
        put("json_decimals", self._choice("json_decimals", json_decimals, JsonDecimals))
        put("time_format", time_format)
        put("deletion", deletion)
        put("resets", resets)
        put("order_by", self._column_names("order_by", order_by))
        put("duplicates", duplicates)
        put("where", where)
        put("length_max", length_max)
        put("reduce", None if reduce is None else self._choice("reduce", reduce, Reduce))
        for by, names in zip(By, (last_by, first_by, max_by, min_by), strict=True):
            put(by.value, self._column_names(by.value, names))
        put("late", self._choice("late", late, Late))
        put("columns", dict(columns or {}))
        self._check()

    def _implied_kind(self) -> Kind:
        if self.member is not None:
            return Kind.SET if self.score is None else Kind.SORTED_SET
        return Kind.MAP if self.field is not None or len(self.value) > 1 else Kind.VALUE

    def _implied_encoding(self) -> Encoding:
        is_one_text = self.field is not None or self.kind is not Kind.MAP
        return Encoding.JSON if is_one_text and len(self.value) > 1 else Encoding.TEXT

    def _check(self) -> None:
        self._check_key()
        if self.member is not None or self.score is not None or self.kind in (Kind.SET, Kind.SORTED_SET):
            self._check_set()
        elif not self.value and self.reduce is not Reduce.COUNT:
            raise DescriptorError(f"state {self.name!r}: value= must name at least one column")
        self._check_kind()
        self._check_options()
        self._check_by()
        if self.reduce is not None:
            self._check_reduce(self.reduce)

    def _check_key(self) -> None:
        """Check that the options which take a string have one, and that the key names a column if it has to."""
        if bool(self.key) == (self.key_format is not None):
            raise DescriptorError(f"state {self.name!r}: give either key= or key_format=, and not both")
        if not isinstance(self.separator, str):
            raise DescriptorError(f"state {self.name!r}: separator= must be a string, not {self.separator!r}")
        for option in (
            "key_format", "field", "member", "score", "deletion", "expire_at", "resets", "where", "time_format"
        ):  # fmt: skip
            value = getattr(self, option)
            if value is not None and not (isinstance(value, str) and value):
                raise DescriptorError(f"state {self.name!r}: {option}= must be a non-empty string, not {value!r}")
        form = self.format_for("job")
        is_folded = self.reduce is not None or self.by is not None
        if not form.columns and self.field is None and self.member is None and not is_folded:
            raise DescriptorError(
                f"the key format {form.text!r} names no column, so that all rows would make one key; "
                f"write one as <column>, or give field= or member="
            )

    def _check_kind(self) -> None:
        """Check that the kind of the state fits its value and field columns."""
        if len(set(self.value)) < len(self.value):
            raise DescriptorError(f"state {self.name!r}: value= names a column twice")
        if self.field is not None and len(self.value) > 1 and self.encoding is not Encoding.JSON:
            raise DescriptorError(
                f"state {self.name!r}: a field has several value columns only as one JSON object; leave out "
                f"encoding={self.encoding.value!r}"
            )
        if self.field is not None and self.kind is not Kind.MAP:
            raise DescriptorError(f"state {self.name!r}: field= makes a map; leave out kind={self.kind.value!r}")
        if self.kind is not Kind.MAP and len(self.value) > 1 and self.encoding is not Encoding.JSON:
            raise DescriptorError(
                f"state {self.name!r}: several value columns are one {self.kind.value} only as a JSON object; leave "
                f"out encoding={self.encoding.value!r}, or kind={self.kind.value!r} for a map"
            )

    def _check_options(self) -> None:
        if self.length_max is not None and (self.kind is not Kind.LIST or not _is_count(self.length_max)):
            raise DescriptorError(
                f"state {self.name!r}: length_max= is a number of elements, at least 1, of a state with kind='list'"
            )
        if self.ttl is not None and self.expire_at is not None:
            raise DescriptorError(f"state {self.name!r}: give either ttl= or expire_at=, and not both")
        if self.resets is not None and self.kind is not Kind.LIST:
            raise DescriptorError(f"state {self.name!r}: resets= is for a state with kind='list'")
        if self.duplicates not in ("error", "any"):
            raise DescriptorError(f"state {self.name!r}: duplicates= is 'error' or 'any', not {self.duplicates!r}")

    def _check_set(self) -> None:
        state = f"state {self.name!r}"
        if self.member is None:
            given = "score=" if self.score is not None else f"kind={self.kind.value!r}"
            raise DescriptorError(f"{state}: {given} needs member= with the column that is the member")
        for option in ("value", "field", "reduce"):
            if getattr(self, option):
                raise DescriptorError(
                    f"{state}: member= makes a set, which has no {option}; leave out {option}=, or member="
                )
        if self.kind is not self._implied_kind():
            given = "member= and score=" if self.score is not None else "member= without score="
            implied = self._implied_kind().value
            raise DescriptorError(
                f"{state}: {given} makes a state of kind {implied!r}; leave out kind={self.kind.value!r}"
            )
        if self.score == self.member:
            raise DescriptorError(f"{state}: member= and score= name the same column {self.member!r}")
        if self.encoding is not Encoding.TEXT:
            raise DescriptorError(f"{state}: members are written as text, binary ones as they are; leave out encoding=")

    @property
    def by(self) -> By | None:
        """Which row of a key the state keeps by its order among the rows of all micro-batches; None: the newest."""
        return next((by for by in By if getattr(self, by)), None)

    @property
    def by_columns(self) -> tuple[str, ...]:
        """The columns of that order; empty if `by` is None."""
        return () if self.by is None else tuple(getattr(self, self.by))

    def _check_by(self) -> None:
        """Check the options of a state whose rows have an order across micro-batches."""
        given = [by for by in By if getattr(self, by)]
        if self.late is not Late.INSERT and (not given or self.kind is not Kind.LIST):
            raise DescriptorError(
                f"state {self.name!r}: late={self.late.value!r} is for a list with {', '.join(f'{by}=' for by in By)}"
            )
        if not given:
            return
        option = f"state {self.name!r}: {given[0]}="
        if len(given) > 1:
            raise DescriptorError(f"{option} and {given[1]}= do not go together; give two states, one with each")
        if self.kind in (Kind.SET, Kind.SORTED_SET):
            raise DescriptorError(f"{option} is not for a set, whose members have no order of rows; leave it out")
        if self.kind is Kind.LIST and (self.length_max is None or self.length_max > ORDERED_LENGTH_MAX):
            raise DescriptorError(
                f"{option} keeps a list in order within its maximum length; give length_max=, at most "
                f"{ORDERED_LENGTH_MAX}"
            )
        for other in ("reduce", "order_by", "deletion", "resets"):
            if getattr(self, other):
                raise DescriptorError(
                    f"{option} orders the rows of all micro-batches, whenever they come; leave out {other}="
                )
        if self.duplicates != "error":
            raise DescriptorError(f"{option} decides between the rows of a key; leave out duplicates=")

    def _check_reduce(self, reduce: Reduce) -> None:
        option = f"state {self.name!r}: reduce={reduce.value!r}"
        if self.kind is Kind.LIST:
            raise DescriptorError(f"{option} is not for a list, whose rows are appended; leave out one of them")
        if len(self.value) > 1:
            raise DescriptorError(
                f"{option} takes one value column; for several, give several StateDescriptors in one call, each with "
                f"its own reduce="
            )
        if self.kind is Kind.MAP and self.field is None:
            raise DescriptorError(f"{option} makes a map only with field=; leave out kind='map'")
        for other in ("deletion", "expire_at"):
            if getattr(self, other) is not None:
                raise DescriptorError(
                    f"{option} and {other}= do not go together: rows are folded, whatever their order"
                )
        if reduce is Reduce.LAST:
            if not self.order_by and self.duplicates == "error":
                raise DescriptorError(
                    f"{option} needs order_by= with the column that determines the last row, or duplicates='any'"
                )
            return
        if self.order_by or self.duplicates != "error":
            raise DescriptorError(
                f"{option} folds all rows of a key, in any order; leave out order_by= and duplicates="
            )
        if self.encoding is not Encoding.TEXT:
            raise DescriptorError(f"{option} takes encoding='text', not {self.encoding.value!r}")

    def _column_names(self, option: str, given: str | Sequence[str]) -> tuple[str, ...]:
        try:
            names = (given,) if isinstance(given, str) else tuple(given)
        except TypeError:
            names = ("",)
        if not all(isinstance(name, str) and name for name in names):
            raise DescriptorError(f"state {self.name!r}: {option}= takes column names, not {given!r}")
        return names

    def _choice(self, option: str, given: object, choices: type[Choice]) -> Choice:
        try:
            return choices(given)  # type: ignore[arg-type]  # a wrong value raises the ValueError below
        except ValueError:
            names = ", ".join(repr(choice.value) for choice in choices)
            raise DescriptorError(f"state {self.name!r}: {option}= is one of {names}, not {given!r}") from None

    def _lifetime(self, given: object) -> timedelta | None:
        if given is None:
            return None
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            with suppress(ValueError, OverflowError):  # nan, inf
                given = timedelta(seconds=given)
        if not isinstance(given, timedelta) or given < timedelta(milliseconds=1):
            raise DescriptorError(
                f"state {self.name!r}: ttl= is a timedelta or seconds, at least a millisecond, not {given!r}"
            )
        return given

    @property
    def object_names(self) -> tuple[str, ...]:
        """The value columns, if they are one JSON object; else empty."""
        is_hash = self.kind is Kind.MAP and self.field is None
        return self.value if self.encoding is Encoding.JSON and len(self.value) > 1 and not is_hash else ()

    @property
    def ttl_ms(self) -> int | None:
        """The time to live in milliseconds; None if there is none."""
        return None if self.ttl is None else self.ttl // timedelta(milliseconds=1)

    def format_for(self, job: str) -> KeyFormat:
        """Return the format of this state's keys in a job."""
        if self.key_format is not None:
            return KeyFormat.parse(self.key_format)
        return KeyFormat.default(job, self.name, self.key, self.separator)

    def for_job(self, job: str) -> StateDescriptor:
        """Return the descriptor as the log stores it: with the full key format in place of the key columns."""
        return replace(self, key=(), key_format=self.format_for(job).text)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which `from_json` reads."""
        return {
            "name": self.name,
            "kind": str(self.kind),
            "key": list(self.key),
            "key_format": self.key_format,
            "separator": self.separator,
            "value": list(self.value),
            "field": self.field,
            "member": self.member,
            "score": self.score,
            "ttl_ms": self.ttl_ms,
            "expire_at": self.expire_at,
            "encoding": str(self.encoding),
            "json_decimals": str(self.json_decimals),
            "time_format": self.time_format,
            "deletion": self.deletion,
            "resets": self.resets,
            "order_by": list(self.order_by),
            "duplicates": self.duplicates,
            "where": self.where,
            "length_max": self.length_max,
            "reduce": None if self.reduce is None else str(self.reduce),
            **{by.value: list(getattr(self, by)) for by in By},
            "late": str(self.late),
            "columns": dict(self.columns),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> StateDescriptor:
        """Read a JSON object of `to_json`. Unknown names are ignored, so that older servers read newer logs."""
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        ttl_ms = stored.get("ttl_ms")
        return cls(**fields, ttl=None if ttl_ms is None else timedelta(milliseconds=ttl_ms))


def check_states(job: str, states: Sequence[StateDescriptor]) -> None:
    """Refuse two states of a job with the same name, or with formats that could make the same key, or a feed's key."""
    if not states:
        raise DescriptorError(f"job {job!r} declares no state")
    formats: list[KeyFormat] = []
    for state in states:
        mine = state.format_for(job)
        if mine.literals[0].startswith(feed_key(job)):
            raise DescriptorError(
                f"state {state.name!r} of job {job!r} has keys that begin with {feed_key(job)!r} ({mine.text!r}), as "
                f"those of the job's change feed do; choose another name or key format"
            )
        for other, theirs in zip(states, formats, strict=False):
            if state.name == other.name:
                raise DescriptorError(f"job {job!r} declares the state {state.name!r} twice")
            if mine.overlaps(theirs):
                raise DescriptorError(
                    f"states {other.name!r} and {state.name!r} of job {job!r} could make the same key "
                    f"({theirs.text!r}, {mine.text!r}); give them key formats that start or end differently"
                )
        formats.append(mine)
