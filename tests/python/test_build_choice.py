"""What a build chooses: with CUDA or without, and whose nvcc. Fake compilers stand for the real ones."""

import importlib.metadata
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKING, OLD = "13.0.88", "12.6.85"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """Return the build backend, as on a machine without any CUDA, in a checkout of its own."""
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "build_backend")
    for name in ("octavo_build", "octavo_nvcc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import octavo_build

    for name in ("OCTAVO_CUDA", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(octavo_build, "ROOT", tmp_path / "checkout")
    (tmp_path / "checkout").mkdir()
    nvcc = octavo_build.octavo_nvcc
    monkeypatch.setattr(nvcc, "DEFAULT_CUDA_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(nvcc, "find_pypi", lambda: None)
    monkeypatch.setattr(nvcc, "pypi_has_compiler", lambda: True)
    monkeypatch.setattr(nvcc, "has_driver", lambda: False)
    return octavo_build


@pytest.fixture
def nvcc(backend):
    return backend.octavo_nvcc


def make_nvcc(folder, version=WORKING, status=0, message=""):
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "Cuda compilation tools, V{version}"; exit 0; }}\n'
        f"echo '{message}' >&2\nexit {status}\n"
    )
    nvcc.chmod(0o755)
    return str(nvcc)


def chosen(backend, settings=None):
    """Return what scikit-build-core is told."""
    told = backend.build_settings(settings, backend.choose(backend.cuda_mode(settings)))
    return {name.removeprefix("cmake.define."): value for name, value in told.items()}


# With CUDA or without


def expected(mode, installed, driver, on_pypi):
    """Return where the nvcc comes from: "machine", "pypi", None for a CPU build, or "error"."""
    if mode == "OFF":
        return None
    if installed == WORKING:
        return "machine"
    if mode == "AUTO" and installed is None and not driver:
        return None
    if on_pypi:
        return "pypi"
    return "error" if mode == "ON" else None


@pytest.mark.parametrize(
    ("mode", "installed", "driver", "on_pypi"),
    [*itertools.product(("AUTO", "ON", "OFF"), (None, OLD, WORKING), (False, True), (False, True))],
)
def test_choice(backend, nvcc, monkeypatch, tmp_path, mode, installed, driver, on_pypi):
    if installed:
        make_nvcc(tmp_path / "bin", installed)
    monkeypatch.setattr(nvcc, "has_driver", lambda: driver)
    monkeypatch.setattr(nvcc, "pypi_has_compiler", lambda: on_pypi)
    monkeypatch.setattr(nvcc, "find_pypi", lambda: "pypi-nvcc")
    monkeypatch.setenv("OCTAVO_CUDA", mode)

    source = expected(mode, installed, driver, on_pypi)
    if source == "error":
        with pytest.raises(SystemExit, match=r"OCTAVO_CUDA=ON, but .*PyPI has none for this platform"):
            backend.compiler_requirements(None)
        return
    assert backend.compiler_requirements(None) == (nvcc.PYPI_PACKAGES if source == "pypi" else [])
    told = chosen(backend)
    assert told["OCTAVO_CUDA"] == ("ON" if source else "OFF")
    paths = {"machine": str(tmp_path / "bin" / "nvcc"), "pypi": "pypi-nvcc", None: None}
    assert told.get("CMAKE_CUDA_COMPILER") == paths[source]
    assert told.get("wheel.build-tag") == (None if source else "0cpu_only")
    assert told["build-dir"].endswith("-cuda" if source else "-cpu")


@pytest.mark.parametrize(
    ("mode", "installed", "reason"),
    [
        ("OFF", WORKING, "asked for by OCTAVO_CUDA=OFF"),
        ("AUTO", None, "neither nvcc nor an NVIDIA driver was found"),
        ("AUTO", OLD, "nvcc is version 12.6.85, and 12.8 is needed, and PyPI has none for this platform"),
    ],
)
def test_reason_of_a_cpu_build(backend, nvcc, monkeypatch, tmp_path, mode, installed, reason):
    if installed:
        make_nvcc(tmp_path / "bin", installed)
    monkeypatch.setattr(nvcc, "pypi_has_compiler", lambda: False)
    monkeypatch.setenv("OCTAVO_CUDA", mode)
    assert reason in chosen(backend)["OCTAVO_CUDA_REASON"]


def test_driver_is_what_the_dynamic_linker_or_the_kernel_shows(monkeypatch, backend):
    monkeypatch.undo()  # of the fixture's has_driver
    nvcc, loaded, paths = backend.octavo_nvcc, [], []

    def load(name):
        loaded.append(name)
        raise OSError("no such file")

    monkeypatch.setattr(nvcc.ctypes, "CDLL", load)
    monkeypatch.setattr(nvcc.Path, "exists", lambda path: paths.append(str(path)) or False)
    assert not nvcc.has_driver()
    assert loaded == ["libcuda.so.1"] and paths == ["/proc/driver/nvidia/version"]
    monkeypatch.setattr(nvcc.Path, "exists", lambda path: True)
    assert nvcc.has_driver()
    monkeypatch.setattr(nvcc.Path, "exists", lambda path: False)
    monkeypatch.setattr(nvcc.ctypes, "CDLL", loaded.append)
    assert nvcc.has_driver()


def test_setting_goes_before_environment(backend, monkeypatch):
    monkeypatch.setenv("OCTAVO_CUDA", "ON")
    settings = {"cmake.define.OCTAVO_CUDA": "OFF", "build-dir": ""}
    assert backend.compiler_requirements(settings) == []
    told = chosen(backend, settings)
    assert told["OCTAVO_CUDA"] == "OFF" and told["build-dir"] == ""


def test_unknown_mode_is_an_error(backend, monkeypatch):
    monkeypatch.setenv("OCTAVO_CUDA", "maybe")
    with pytest.raises(SystemExit, match="must be ON, OFF or AUTO, not 'maybe'"):
        backend.compiler_requirements(None)


def test_read_only_sources_keep_nothing(backend, nvcc, monkeypatch):
    monkeypatch.setattr(nvcc, "has_driver", lambda: True)
    monkeypatch.setattr(nvcc, "find_pypi", lambda: "pypi-nvcc")
    monkeypatch.setattr(backend.os, "access", lambda path, mode: False)
    told = chosen(backend)
    assert "build-dir" not in told and told["CMAKE_CUDA_COMPILER"] == "pypi-nvcc"
    with backend.one_build_at_a_time():
        assert list(backend.ROOT.iterdir()) == []


# Whose nvcc


@pytest.mark.parametrize("version", ["12.8.61", "13.0.88", "14.1.0"])
def test_nvcc_on_path_is_taken(backend, tmp_path, version):
    nvcc = make_nvcc(tmp_path / "bin", version)
    assert backend.compiler_requirements(None) == []
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc


def test_default_toolkit_is_taken(backend, tmp_path):
    nvcc = make_nvcc(tmp_path / "default" / "bin")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc


def test_cuda_home_comes_before_path(backend, tmp_path, monkeypatch):
    make_nvcc(tmp_path / "bin")
    nvcc = make_nvcc(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        ({"version": OLD}, "is version 12.6.85, and 12.8 is needed"),
        ({"version": "unknown"}, "--version names no version"),
        ({"status": 1, "message": "cannot find -lcudart_static"}, "(cannot find -lcudart_static)"),
    ],
)
def test_unusable_nvcc_is_passed_over(backend, nvcc, tmp_path, monkeypatch, old, reason):
    make_nvcc(tmp_path / "bin", **old)
    assert backend.compiler_requirements(None) == nvcc.PYPI_PACKAGES
    monkeypatch.setattr(nvcc, "find_pypi", lambda: "pypi-nvcc")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == "pypi-nvcc"
    assert reason in chosen(backend)["OCTAVO_CUDA_REASON"]

    good = make_nvcc(tmp_path / "default" / "bin")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == good


def test_unusable_cudacxx_is_an_error(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDACXX", make_nvcc(tmp_path / "old", "11.8.89"))
    make_nvcc(tmp_path / "bin")
    with pytest.raises(SystemExit, match=r"CUDACXX is set, but .*/old/nvcc is version 11\.8\.89"):
        backend.compiler_requirements(None)


@pytest.mark.parametrize("mode", ["AUTO", "ON"])
def test_missing_packages_are_an_error(backend, nvcc, monkeypatch, mode):
    # As under pip's --no-build-isolation, where nobody has installed the requirements.
    monkeypatch.setattr(nvcc, "has_driver", lambda: True)
    monkeypatch.setenv("OCTAVO_CUDA", mode)
    with pytest.raises(SystemExit, match=r"cannot be built: no nvcc found, and .*nvidia-cuda-nvcc=="):
        chosen(backend)


# The compiler from PyPI, and its copy


def test_packages_are_pinned_and_required(backend, nvcc, monkeypatch):
    monkeypatch.setenv("OCTAVO_CUDA", "ON")
    assert all(re.fullmatch(r"nvidia-[a-z-]+==13\.0\.\d+", pin) for pin in nvcc.PYPI_PACKAGES)
    assert set(nvcc.PYPI_PACKAGES) <= set(backend.get_requires_for_build_wheel())
    assert set(nvcc.PYPI_PACKAGES) <= set(backend.get_requires_for_build_editable())


@pytest.fixture
def fetched(nvcc, monkeypatch, tmp_path):
    """Install packages that look like NVIDIA's, as pip does for one build; return their folder."""
    site = tmp_path / "site-packages"
    for name, version in nvcc.PYPI_VERSIONS.items():
        files = {f"nvidia/cu13/lib/{name}.a": f"{name} {version}"}
        if name == "nvidia-cuda-nvcc":
            files["nvidia/cu13/bin/nvcc"] = "#!/bin/sh\n"
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in files)
        for file, text in files.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text(text)
    (site / "nvidia/cu13/bin/nvcc").chmod(0o755)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(nvcc, "has_driver", lambda: True)
    return site


def test_fetched_compiler_is_copied_once(backend, fetched, monkeypatch):
    assert backend.compiler_requirements(None) != []
    copy = chosen(backend)["CMAKE_CUDA_COMPILER"]
    assert copy == str(backend.ROOT / "build/pip/nvcc-13.0.88/nvidia/cu13/bin/nvcc")
    assert os.access(copy, os.X_OK)

    # The next build has no packages in its environment: they are not asked for.
    fetched.rename(fetched.with_name("gone"))
    assert backend.compiler_requirements(None) == []
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == copy


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def change_pins(manifest):
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "packages": ["nvidia-cuda-nvcc==12.9.0"]}))


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (cut, "nvidia/cu13/bin/nvcc"),
        (cut, "manifest.json"),
        (Path.unlink, "nvidia/cu13/lib/nvidia-nvvm.a"),
        (Path.unlink, "manifest.json"),
        (change_pins, "manifest.json"),
    ],
)
def test_damaged_copy_is_made_again(backend, fetched, damage, file):
    copy = chosen(backend)["CMAKE_CUDA_COMPILER"]
    folder = backend.ROOT / "build/pip/nvcc-13.0.88"
    whole = (folder / file).read_bytes()
    damage(folder / file)
    assert backend.compiler_requirements(None) != []
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == copy
    assert (folder / file).read_bytes() == whole


def test_interrupted_copy_is_not_taken(backend, nvcc, fetched, monkeypatch):
    def interrupt(source, target):
        Path(target).write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nvcc.shutil, "copy2", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chosen(backend)
    assert backend.compiler_requirements(None) != []
    copy = chosen(backend)["CMAKE_CUDA_COMPILER"]
    assert Path(copy).read_text() == "#!/bin/sh\n"
    assert sorted(path.name for path in (backend.ROOT / "build/pip").iterdir()) == ["nvcc-13.0.88"]


def test_other_packages_are_used_where_they_are(backend, nvcc, fetched, monkeypatch):
    # An environment of the user's (--no-build-isolation), with another release of the compiler.
    monkeypatch.setitem(nvcc.PYPI_VERSIONS, "nvidia-nvvm", "13.0.99")
    monkeypatch.setattr(nvcc, "find_pypi", lambda: "the user's nvcc")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == "the user's nvcc"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "13.0.99")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == "the user's nvcc"


# What the wheel depends on


@pytest.mark.parametrize(
    ("free_threaded", "version", "linked_in"),
    [
        (0, (3, 10), False),
        (None, (3, 15), False),
        (1, (3, 13), True),
        (1, (3, 14), True),
        (1, (3, 15), False),
    ],
)
def test_dependencies(monkeypatch, free_threaded, version, linked_in):
    monkeypatch.setattr("sysconfig.get_config_var", {"Py_GIL_DISABLED": free_threaded}.get)
    monkeypatch.setattr(sys, "version_info", version)
    module = runpy.run_path(str(ROOT / "build_backend" / "octavo_dependencies.py"))
    core = [] if linked_in else ["nanobind-backend>=1.0,<2"]
    assert module["dynamic_metadata"]({}, {}) == {"dependencies": ["numpy>=2.1", *core]}
    assert module["NANOBIND_CORE"] == core


# What the user sees

REPORT = """
import os, sys
sys.path.insert(0, "build_backend")
import octavo_build
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # as under pip, which shows nothing of a build that succeeds
octavo_build.report(octavo_build.Choice(False, "no reason"))
octavo_build.report(octavo_build.Choice(True, "", "nvcc"))
"""


# Gives the program a terminal. A process of its own does, since JAX's threads in this one may not be forked.
AT_A_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-c", sys.argv[1]])))
"""


def test_cpu_build_says_so_at_the_terminal():
    pytest.importorskip("scikit_build_core")
    result = subprocess.run(
        [sys.executable, "-c", AT_A_TERMINAL, REPORT],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.decode().split("\r\n") == [
        "",
        "Octavo: CUDA OFF (no reason): this build is for the CPU only. "
        "To build with CUDA, run: OCTAVO_CUDA=ON pip install .",
        "",
    ]


# Wheels that are published are built with CUDA, wherever that is done

STUB = """\
#!/bin/sh
# Stands for Python and for the programs of the environment that it makes; notes how they are called.
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/auditwheel"
else
    echo "OCTAVO_CUDA=$OCTAVO_CUDA $*" >>"$LOG"
fi
"""


@pytest.mark.parametrize(("given", "mode"), [({}, "ON"), ({"OCTAVO_CUDA": "OFF"}, "OFF")])
def test_build_wheels_builds_with_cuda_and_from_nothing(tmp_path, given, mode):
    stub, log = tmp_path / "stub", tmp_path / "log"
    stub.write_text(STUB)
    stub.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "OCTAVO_CUDA"}
    variables |= {"PYTHON": str(stub), "LOG": str(log), **given}
    subprocess.run([ROOT / "tools" / "build-wheels", tmp_path / "dist"], env=variables, check=True)
    [command] = [line for line in log.read_text().splitlines() if " pip wheel " in line]
    assert command.startswith(f"OCTAVO_CUDA={mode} -m pip wheel ")
    assert " --config-settings=build-dir= " in command


def test_ci_builds_with_cuda():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^export OCTAVO_CUDA=ON .*\n(.*\n)?.*tools/build-wheels ", script, re.MULTILINE)
    assert "grep -- '-- Octavo: CUDA ON'" in script


def test_cibuildwheel_builds_with_cuda_and_from_nothing():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert settings["environment"] == {"OCTAVO_CUDA": "ON"}
    assert settings["config-settings"] == {"build-dir": ""}
