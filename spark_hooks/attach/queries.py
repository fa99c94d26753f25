"""The queries of `sparkis attach --checkpoint PATH`, and the names of their jobs. Imports no Spark.

PATH is a query's checkpoint, or a folder with checkpoints below it, such as a pipeline's storage. A job's name depends
on the query's path only: it stays the same when other queries come and go.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from state_backend.checkpoint.discovery import LOOKED_FOR, Flow, Folder, FoundQuery, is_checkpoint, queries_below
from state_backend.model.descriptor import check_name
from state_backend.model.errors import CheckpointError, DescriptorError

PLACEHOLDER = re.compile(r"<([^<>]*)>")
# What a job's name must not have; `_` stands in its place in names that are made of paths.
UNFIT = re.compile(r"[\s\x00-\x1f\x7f\ud800-\udfff:{}/\\<>]+|^\.+")

# Opens a folder of the storage that the reader reads.
OpenFolder = Callable[[str], Folder]


@dataclass(frozen=True)
class Source:
    """A --checkpoint of the command, with its --job.

    Args:
        number: Its place on the command line.
        location: The path or address, as it was given.
        job: The job's name, which may have placeholders; None: the default.
        is_single: Whether it is one query's checkpoint. Otherwise there are queries below it.
    """

    number: int
    location: str
    job: str | None
    folder: Folder
    is_single: bool

    def queries(self) -> list[FoundQuery]:
        """Return its queries; of a folder those that are there now."""
        return [FoundQuery("", "")] if self.is_single else queries_below(self.folder)

    def checkpoint_of(self, query: FoundQuery) -> str:
        """Return the location of a query's checkpoint."""
        return self.location if self.is_single else self.folder.name(query.checkpoint)

    def job_of(self, query: FoundQuery) -> str:
        """Return the name of a query's job; DescriptorError if a job cannot have the name."""
        flow = Flow.of(self.folder.location if self.is_single else self.checkpoint_of(query))
        if self.job is not None and not PLACEHOLDER.search(self.job):
            return check_name("job", self.job)
        if flow is not None:
            name = _fit(flow.default_name)
        elif self.is_single:
            name = self._name_of_folder()
        else:
            name = _fit(query.path.replace("/", "."))
        return check_name("job", name if self.job is None else _filled(self.job, name, flow))

    def _name_of_folder(self) -> str:
        name = self.folder.location.rstrip("/").rpartition("/")[2]
        try:
            return check_name("job", name)
        except DescriptorError:
            raise DescriptorError(
                f"the checkpoint's folder {name!r} cannot be the job's name, with which keys begin: give one with --job"
            ) from None


def _fit(name: str) -> str:
    """Return a name that a job can have, with `_` in place of forbidden characters."""
    return UNFIT.sub("_", name)


def _filled(text: str, name: str, flow: Flow | None) -> str:
    """Return the text of --job with the names in place of its placeholders."""
    names = {"name": name} | ({} if flow is None else {each: _fit(part) for each, part in flow._asdict().items()})

    def named(found: re.Match[str]) -> str:
        if found[1] not in names:
            raise DescriptorError(
                f"--job {text!r}: <{found[1]}> is not known of {name!r}; known are "
                f"{', '.join(f'<{each}>' for each in names)}"
            )
        return names[found[1]]

    return PLACEHOLDER.sub(named, text)


def sources_of(options: argparse.Namespace, open_folder: OpenFolder) -> list[Source]:
    """Return the checkpoints and folders of a command."""
    names = options.job or [None] * len(options.checkpoint)
    if len(names) != len(options.checkpoint):
        raise DescriptorError(
            f"{len(options.checkpoint)} checkpoints and {len(names)} jobs: give each --checkpoint one --job, in the "
            f"same order, or leave --job out"
        )
    sources = []
    for number, (location, job) in enumerate(zip(options.checkpoint, names, strict=True)):
        folder = open_folder(location)
        sources.append(Source(number, location, job, folder, _is_single(folder)))
    return sources


def _is_single(folder: Folder) -> bool:
    """Return whether this is a query's checkpoint, also before its first micro-batch; CheckpointError: no query."""
    if is_checkpoint(folder):
        return True
    if queries_below(folder):
        return False
    names = folder.names("")
    if "metadata" in names:
        return True
    raise CheckpointError(
        f"{folder.location} is not the checkpoint of a query: "
        f"{'it has no file `metadata`' if names else 'it is empty, or does not exist'}; and no query is below it: "
        f"{LOOKED_FOR}"
    )


def check_jobs(sources: Iterable[Source]) -> None:
    """Raise DescriptorError if two queries would be one job."""
    taken: dict[str, str] = {}
    for source in sources:
        for query in source.queries():
            job, checkpoint = source.job_of(query), source.checkpoint_of(query)
            check_free(job, checkpoint, taken)
            taken[job] = checkpoint


def check_free(job: str, checkpoint: str, taken: Mapping[str, str]) -> None:
    """Raise DescriptorError if another checkpoint is the job; `taken` has checkpoints by their jobs."""
    if job in taken:
        raise DescriptorError(
            f"{taken[job]} and {checkpoint} would both be job {job!r}: give each --checkpoint a --job of its own. The "
            f"text of --job may have <name>, as 'a.<name>', and for flows of several schemas or catalogs be "
            f"'<schema>.<name>' or '<catalog>.<schema>.<name>'"
        )
