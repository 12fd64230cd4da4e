"""What compose.yaml and the Dockerfile promise, checked without Docker; `config` where it is."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from pageferry.compose import cli
from pageferry.compose.embedded_valkey import server_binary
from pageferry.compose.requirements import requirements
from pageferry.kvtransfer.settings import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    from_args,
)

FOLDER = Path(cli.__file__).resolve().parent
ROOT = FOLDER.parent
OURS = ("gateway", "prefill", "decode")
SETTINGS = {"gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def with_defaults(text: str) -> str:
    """What compose makes of `${NAME:-default}` when nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (FOLDER / "compose.yaml").read_text()
    return dict(yaml.safe_load(with_defaults(text)))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


def seconds(text: str) -> float:
    units = {"s": 1, "m": 60}
    return sum(float(n) * units[u] for n, u in re.findall(r"(\d+)([sm])", text))


def test_only_the_gateway_is_published_and_only_on_loopback(services):
    assert {name for name, s in services.items() if "ports" in s} == {"gateway"}
    assert services["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert not any("network_mode" in s for s in services.values())


def test_redis_and_page_transfers_stay_on_the_internal_network(compose, services):
    assert compose["networks"]["inside"]["internal"] is True
    for name in ("redis", "prefill", "decode"):
        assert services[name]["networks"] == ["inside"], name
    assert set(services["gateway"]["networks"]) == {"inside", "outside"}


@pytest.mark.parametrize("password", ["", "pass word's $HOME `id`"])
def test_redis_is_bounded_keeps_its_password_and_shows_it_to_nobody(services, tmp_path, password):
    """The command as it stands, with a real server."""
    binary = tmp_path / "valkey-server"
    binary.symlink_to(server_binary())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shell, flag, script = services["redis"]["command"]
    script = script.replace("END\nsave", f"END\nport {port}\nsave")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": password}
    server = subprocess.Popen([shell, flag, script], env=env, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, password=password or None, socket_timeout=5)
        deadline = time.monotonic() + 20
        while True:
            try:
                options = client.config_get("*")
                break
            except redis.ConnectionError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
        client.close()
        wanted = {"maxmemory-policy": "noeviction", "maxmemory": str(512 * 2**20)}
        wanted |= {"save": "", "appendonly": "no", "requirepass": password}
        assert {name: options[name] for name in wanted} == wanted
        if password:
            stranger = redis.Redis(port=port, socket_timeout=5)
            with pytest.raises(redis.AuthenticationError):
                stranger.ping()
            stranger.close()
            argv = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert password.encode() not in argv
            assert b"valkey-server" in argv
    finally:
        server.kill()
        server.wait(10)
    assert "REDIS_PASSWORD:" not in str(services["redis"]["healthcheck"])


def test_services_can_be_scaled(services):
    for name in ("prefill", "decode"):
        assert not services[name].keys() & {"container_name", "hostname", "ports"}, name


@pytest.mark.parametrize("name", OURS)
def test_environment_is_what_the_service_reads(services, name):
    environment = {k: str(v) for k, v in services[name]["environment"].items()}
    settings = from_args(SETTINGS[name], name, "", [], environment)
    assert settings.redis_url == "redis://:@redis:6379/0"
    known = {"PAGEFERRY_" + f.upper() for f in SETTINGS[name].__dataclass_fields__}
    assert environment.keys() <= known


def test_decode_workers_can_be_reached_and_gateways_too(services):
    assert services["decode"]["environment"]["PAGEFERRY_BIND"] == "0.0.0.0"
    assert services["gateway"]["environment"]["PAGEFERRY_HOST"] == "0.0.0.0"


@pytest.mark.parametrize("name", OURS)
def test_docker_waits_longer_than_the_service_drains(services, name):
    service = services[name]
    drain_s = float(service["environment"]["PAGEFERRY_DRAIN_S"])
    assert seconds(service["stop_grace_period"]) >= drain_s + 10
    assert service["init"] is True


@pytest.mark.parametrize("name", OURS)
def test_health_checks_are_patient(services, name):
    check = services[name]["healthcheck"]
    if name != "gateway":
        assert check["test"][-1] == services[name]["environment"]["PAGEFERRY_ALIVE_FILE"]
    assert check["retries"] >= 3
    assert seconds(check["timeout"]) >= 10
    assert seconds(check["start_period"]) >= (120 if name == "gateway" else 600)


def test_no_service_waits_for_another_ones_health(services):
    for name in OURS:
        conditions = {k: v["condition"] for k, v in services[name]["depends_on"].items()}
        assert conditions == {
            "model": "service_completed_successfully",
            "redis": "service_started",
        }


def test_every_container_is_locked_down(services):
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
    for name in OURS:
        assert services[name]["volumes"] == ["models:/models:ro"]


def test_gpu_override_gives_prefill_and_decode_a_card_each():
    text = with_defaults((FOLDER / "compose.gpu.yaml").read_text())
    cards = {}
    for name, service in yaml.safe_load(text)["services"].items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert "count" not in device
        (cards[name],) = device["device_ids"]
        environment = {k: str(v) for k, v in service["environment"].items()}
        assert from_args(SETTINGS[name], name, "", [], environment).device == "cuda"
    assert cards == {"prefill": "0", "decode": "1"}


def test_dockerfile_has_no_frontend_line_no_shell_entrypoint_and_no_root():
    text = (FOLDER / "Dockerfile").read_text()
    assert "syntax=" not in text
    for stage in ("gateway", "worker"):
        body = text.partition(f"AS {stage}\n")[2].partition("\nFROM ")[0]
        assert 'ENTRYPOINT ["pageferry"]' in body
        assert "USER 10001:10001" in body
        assert body.rstrip().splitlines()[-1].startswith('CMD ["')
    gateway = text.partition("AS gateway\n")[2].partition("\nFROM ")[0]
    assert "requirements.py" not in gateway, "the gateway image needs no worker dependencies"


def test_workers_can_compile_and_load_what_triton_needs(services):
    """Triton calls a C compiler and loads the result; Docker mounts a tmpfs noexec by default."""
    text = (FOLDER / "Dockerfile").read_text()
    parents = {stage: parent for parent, stage in re.findall(r"FROM (\S+) AS (\w+)", text)}
    worker = text.partition("AS worker\n")[2].partition("\nFROM ")[0]
    (home,) = re.findall(r"ENV TRITON_HOME=(\S+)", worker)
    assert parents["worker"] == parents["wheel"] == "compiler"
    for name in ("prefill", "decode"):
        assert services[name]["tmpfs"] == [f"{home}:exec"]


def test_image_dependencies_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = requirements(ROOT / "pyproject.toml", [])
    assert plain == project["dependencies"]
    assert not any(r.startswith(("torch", "transformers")) for r in plain)
    assert any(r.startswith("torch") for r in requirements(ROOT / "pyproject.toml", ["worker"]))


def test_build_context_has_every_package_folder():
    kept = {
        line[1:]
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    assert folders <= kept
    assert {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"} <= kept


def test_every_requirement_is_pinned():
    def name(requirement: str) -> str:
        return re.split(r"[<>=!; \[]", requirement)[0].lower().replace("_", "-")

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", pin) for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    assert {name(r) for r in wanted} <= {name(pin) for pin in pins}


def have_compose() -> bool:
    docker = shutil.which("docker")
    return (
        bool(docker)
        and (
            subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        ).returncode
        == 0
    )


@pytest.mark.skipif(not have_compose(), reason="docker compose is not installed")
@pytest.mark.parametrize("extra", [[], ["-f", "compose.gpu.yaml"], ["--profile", "cpu"]])
def test_docker_compose_accepts_the_files(extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PAGEFERRY_")}
    command = ["docker", "compose", "-f", "compose.yaml", *extra, "config", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=FOLDER, env=env, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
