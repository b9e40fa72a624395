"""Complete the environment of a repository: pytest is in it and starts, and the other slots of the sandbox find it in the cache."""

import json
import os
import tarfile
from typing import Any, Dict, List, Tuple

from environments.swe_smith.in_slot.base import Git, RowError, StepError, cache_folder, last_lines, repository, run, run_step, tracked_files, workspace

#: The file in the environment that describes it.
DESCRIPTION = "swe_smith.json"
#: Plugins that divide, reorder or repeat the tests; each test is run once, in this process, in the order of its file.
UNWANTED_PLUGINS = ("xdist", "randomly", "random_order", "pytest_reverse", "flaky", "rerunfailures", "pytest_repeat")
#: The packages that pytest itself consists of. A project that has one of these names is imported before pytest.
PACKAGES_OF_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "py", "attr", "colorama")
#: What the line begins with on which `START` describes pytest; anything else is the output of pytest, or of a package that is imported.
MARK = "swe_smith: "
#: Describe pytest, and start it without running a test. It is one process, because importing pytest is most of what either takes.
START = """
import importlib, importlib.metadata as metadata, json, os, sys
order = json.loads(sys.argv[1])
import _pytest.config, pytest
for name in _pytest.config.default_plugins:  # so that they are compiled, before the environment can no longer be written
    importlib.import_module("_pytest." + name)
points = metadata.entry_points()
found = points.select(group="pytest11") if hasattr(points, "select") else points.get("pytest11", ())
found = sorted({(point.name, point.value.partition(":")[0]) for point in found})
plugins = [module for name, module in found if not any(unwanted == name or unwanted in module for unwanted in order["unwanted"])]
print("\\n" + order["mark"] + json.dumps([pytest.__version__, sys.path, plugins]), flush=True)
words = [word for module in plugins for word in ("-p", module)] + order["words"]
os.chdir(order["repository"])
if order["late_import"]:  # this process has imported pytest before the repository
    os.execv(sys.executable, [sys.executable, "-m", "pytest"] + words)
sys.path.insert(0, order["repository"])  # as `python -m pytest` does
sys.dont_write_bytecode = True
sys.argv = ["pytest"] + words
sys.exit(int(pytest.main(words)))
"""


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(finish_environment, request, nonce)


def finish_environment(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the program `pytest`, find its plugins, start it once, and put the environment into the cache.

    Args:
        request: `key`, `install`, `site_packages`, `python_version` (as `build_environment` returned them), and `tests`: files for a first start of pytest.

    Returns:
        `description` of the environment.

    Raises:
        RowError: pytest does not start with the settings of the repository.
        StepError: the environment has no pytest.
    """
    folder = os.path.join(workspace(), ".env")
    python = os.path.join(folder, "bin", "python")
    program = os.path.join(folder, "bin", "pytest")
    late_import = _has_package_of_pytest()
    (version, search_path, plugins), options = _start_pytest(python, late_import, request["tests"])
    if not os.path.exists(program):
        with open(program, "w") as file:
            file.write("#!%s\nimport sys\n\nimport pytest\n\nsys.exit(pytest.console_main())\n" % python)
        os.chmod(program, 0o755)
    description = {
        "install": request["install"],
        "python": os.path.realpath(python),
        "python_version": request["python_version"],
        "pytest_version": version,
        # They are named to pytest, because it would also load plugins that a model adds.
        "plugins": plugins,
        "search_path": [path for path in search_path if path and not _is_inside_repository(path)],
        "late_import": late_import,
        "options": options,
    }
    with open(os.path.join(folder, DESCRIPTION), "w") as file:
        json.dump(description, file)
    cache = cache_folder()
    if cache is not None:
        _store(os.path.join(cache, "environment-%s.tar" % request["key"]))
    return {"description": description}


def _is_inside_repository(path: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(repository(), ""))


def _has_package_of_pytest() -> bool:
    """Whether the project is itself one of the packages of pytest, so that pytest must not be imported before it."""
    places = [os.path.join(repository(), part, name) for part in ("", "src") for name in PACKAGES_OF_PYTEST]
    return any(os.path.isdir(path) or os.path.isfile(path + ".py") for path in places)


def _start_pytest(python: str, late_import: bool, tests: List[str]) -> Tuple[List[Any], List[str]]:
    """Start pytest without running a test.

    Args:
        python: the interpreter of the environment.
        late_import: whether pytest must not be imported before the repository.
        tests: files of tests; the first one is collected.

    Returns:
        The version of pytest, the search path and the modules of the plugins; and the further options with which it accepts the settings of the repository.

    Raises:
        RowError: it accepts them with none.
        StepError: the environment has no pytest.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONNOUSERSITE="1", PYTHONDONTWRITEBYTECODE="1")
    order = {"mark": MARK, "unwanted": UNWANTED_PLUGINS, "late_import": late_import, "repository": repository()}
    output = ""
    for options in ([], ["-o", "addopts="]):  # settings often ask for plugins that only the project's own continuous integration has
        words = [*options, "-p", "no:cacheprovider", "--rootdir", repository(), "--collect-only", "-q", *tests[:1]]
        code, output = run([python, "-I", "-c", START, json.dumps({**order, "words": words})], cwd="/", env=env, timeout_s=120)
        described = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
        if not described:
            raise StepError("the environment has no pytest that starts: %s" % last_lines(output))
        if code != 4 and code != 3 and code != -1:  # 4: wrong options; 3: an internal error; others concern the tests
            return json.loads(described[0]), options
    raise RowError("pytest does not start in its environment: %s" % last_lines(output))


def _store(path: str) -> None:
    """Put the environment, and what its install left in the repository, into the cache."""
    with Git() as git:
        untracked = tracked_files(git, "--others")
    partial = "%s.%d" % (path, os.getpid())
    with tarfile.open(partial, "w") as archive:
        archive.add(os.path.join(workspace(), ".env"), ".env")
        for name in untracked:
            archive.add(os.path.join(repository(), name), os.path.join("repo", name))
    os.chmod(partial, 0o664)
    os.rename(partial, path)
