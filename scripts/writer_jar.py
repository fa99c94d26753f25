"""Compile the writer of Real-Time Mode into a jar beside its sources, by whatever compiler there is.

    python scripts/writer_jar.py [--compiler javac|module|janino]

`javac` is that of JAVA_HOME or of the PATH; `module` is the compiler inside of a JDK that has no javac; Janino is among
PySpark's jars, and needs a Java alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "spark_hooks" / "real_time"
SOURCES = sorted(map(str, FOLDER.glob("*.java")))
JAR = FOLDER / "sparkis-writer.jar"
# The oldest Java of Spark 4.
RELEASE = "17"
TIME = (1980, 1, 1, 0, 0, 0)

Compile = Callable[[str, str], list[str] | None]


def _in_java_home(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(name, path=f"{home}/bin") if home else None
    return found or shutil.which(name)


def _javac(class_path: str, folder: str) -> list[str] | None:
    javac = _in_java_home("javac")
    return None if javac is None else [javac, *_options(class_path, folder)]


def _module(class_path: str, folder: str) -> list[str] | None:
    java = _in_java_home("java")
    return (
        None if java is None else [java, "-m", "jdk.compiler/com.sun.tools.javac.Main", *_options(class_path, folder)]
    )


def _options(class_path: str, folder: str) -> list[str]:
    return ["-nowarn", "--release", RELEASE, "-encoding", "UTF-8", "-cp", class_path, "-d", folder, *SOURCES]


def _janino(class_path: str, folder: str) -> list[str] | None:
    java, main = _in_java_home("java"), "org.codehaus.commons.compiler.samples.CompilerDemo"
    arguments = ["-classpath", class_path, "-d", folder, *SOURCES]
    return None if java is None else [java, "-cp", class_path, main, *arguments]


COMPILERS: dict[str, Compile] = {"javac": _javac, "module": _module, "janino": _janino}


def build(jar: Path, compilers: list[str]) -> str:
    """Write the jar with the first compiler that works, and return its name; RuntimeError has what all said."""
    import pyspark  # its jars have the classes that the writer uses

    class_path = os.pathsep.join(map(str, sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))))
    said = []
    for name in compilers:
        with tempfile.TemporaryDirectory() as folder:
            command = COMPILERS[name](class_path, folder)
            if command is None:
                continue
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            classes = sorted(Path(folder).rglob("*.class"))
            if done.returncode == 0 and classes:
                _write(jar, Path(folder), classes)
                return name
            said.append(f"{name}: {done.stdout}{done.stderr}")
    raise RuntimeError("\n".join(said) or "there is no Java")


def _write(jar: Path, folder: Path, classes: list[Path]) -> None:
    unfinished = jar.with_suffix(".new")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF", TIME), "Manifest-Version: 1.0\r\n\r\n")
        for each in classes:
            archive.writestr(zipfile.ZipInfo(each.relative_to(folder).as_posix(), TIME), each.read_bytes())
    unfinished.replace(jar)


def main() -> int:
    """Build the jar; a failure is a message, because all but Real-Time Mode works without it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compiler", choices=COMPILERS, help="only this one (default: the first that works)")
    parser.add_argument("--jar", type=Path, default=JAR)
    options = parser.parse_args()
    try:
        build(options.jar, [options.compiler] if options.compiler else list(COMPILERS))
    except (ImportError, OSError, RuntimeError) as error:
        print(f"setup: {options.jar.name} could not be built, so freshness='record' fails: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
