"""The Kubernetes manifests of docs/deploy: that fields exist, names fit, and options work.

FIELDS is a small table of our own, of the part of Kubernetes' API that the manifests use: by type
its fields, each with the type of what is in it. "[T]" is a list, "{}" any object of texts, "" what
isn't looked into; a field with a star must be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ringcast.frontend.cli import serve
from ringcast.frontend.cli.main import make_parser
from ringcast.frontend.cli.options import read_options
from ringcast.mq.cluster_config import ClusterConfig
from ringcast.mq.config import EngineConfig
from ringcast.mq.server_config import ServerConfig

FOLDER = Path(__file__).parent.parent / "docs" / "deploy"
FILES = ("kubernetes.yaml", "kubernetes-cluster.yaml")
OBJECT = {"apiVersion*": "", "kind*": "", "metadata*": "Metadata"}
FIELDS: dict[str, dict[str, str]] = {
    "Capabilities": {"drop": "[]"},
    "Claim": {**OBJECT, "spec*": "ClaimSpec"},
    "ClaimSpec": {"accessModes*": "[]", "resources*": "Resources"},
    "ClaimTemplate": {"metadata*": "Metadata", "spec*": "ClaimSpec"},
    "Container": {
        **{"name*": "", "image*": "", "command*": "[]", "args": "[]", "env": "[Env]"},
        **{"ports": "[ContainerPort]", "resources": "Resources", "volumeMounts": "[Mount]"},
        **{"startupProbe": "Probe", "livenessProbe": "Probe", "readinessProbe": "Probe"},
        "securityContext": "ContainerSecurity",
    },
    "ContainerPort": {"name*": "", "containerPort*": ""},
    "ContainerSecurity": {"allowPrivilegeEscalation": "", "capabilities": "Capabilities"},
    "Deployment": {**OBJECT, "spec*": "DeploymentSpec"},
    "DeploymentSpec": {
        **{"replicas": "", "selector*": "Selector", "template*": "Template"},
        "strategy": "Strategy",
    },
    "EmptyDir": {"medium": "", "sizeLimit": ""},
    "Env": {"name*": "", "value": "", "valueFrom": "EnvSource"},
    "EnvSource": {"secretKeyRef": "SecretKey", "fieldRef": "FieldRef"},
    "FieldRef": {"fieldPath*": ""},
    "HttpGet": {"path*": "", "port*": ""},
    "Metadata": {"name": "", "labels": "{}"},
    "Mount": {"name*": "", "mountPath*": "", "readOnly": ""},
    "Ordinals": {"start*": ""},
    "PodSecurity": {"runAsNonRoot": "", "runAsUser": "", "runAsGroup": "", "fsGroup": ""},
    "PodSpec": {
        **{"containers*": "[Container]", "initContainers": "[Container]", "volumes": "[Volume]"},
        **{"automountServiceAccountToken": "", "terminationGracePeriodSeconds": ""},
        "securityContext": "PodSecurity",
    },
    "Probe": {
        **{"httpGet*": "HttpGet", "periodSeconds": "", "timeoutSeconds": ""},
        "failureThreshold": "",
    },
    "Resources": {"requests": "{}", "limits": "{}"},
    "SecretKey": {"name*": "", "key*": ""},
    "SecretVolume": {"secretName*": "", "defaultMode": ""},
    "Selector": {"matchLabels*": "{}"},
    "Service": {**OBJECT, "spec*": "ServiceSpec"},
    "ServicePort": {"name": "", "port*": "", "targetPort": ""},
    "ServiceSpec": {
        **{"selector*": "{}", "ports*": "[ServicePort]", "clusterIP": ""},
        "publishNotReadyAddresses": "",
    },
    "StatefulSet": {**OBJECT, "spec*": "StatefulSpec"},
    "StatefulSpec": {
        **{"serviceName*": "", "replicas": "", "selector*": "Selector", "template*": "Template"},
        **{
            "ordinals": "Ordinals",
            "podManagementPolicy": "",
            "volumeClaimTemplates": "[ClaimTemplate]",
        },
    },
    "Strategy": {"type*": ""},
    "Template": {"metadata*": "Metadata", "spec*": "PodSpec"},
    "Volume": {
        **{"name*": "", "emptyDir": "EmptyDir", "secret": "SecretVolume"},
        "persistentVolumeClaim": "VolumeClaim",
    },
    "VolumeClaim": {"claimName*": ""},
}
KINDS = {
    ("v1", "PersistentVolumeClaim"): "Claim",
    ("v1", "Service"): "Service",
    ("apps/v1", "Deployment"): "Deployment",
    ("apps/v1", "StatefulSet"): "StatefulSet",
}


def check(value: Any, kind: str, place: str) -> None:
    if kind.startswith("["):
        assert isinstance(value, list), place
        for i, item in enumerate(value):
            check(item, kind[1:-1], f"{place}[{i}]")
    elif kind:
        assert isinstance(value, dict), place
        if kind != "{}":
            check_fields(value, FIELDS[kind], place)
    else:
        assert isinstance(value, str | int | bool), place


def check_fields(value: dict[str, Any], fields: dict[str, str], place: str) -> None:
    known = {name.rstrip("*"): kind for name, kind in fields.items()}
    assert value.keys() <= known.keys(), (place, value.keys() - known.keys())
    missing = {name[:-1] for name in fields if name.endswith("*")} - value.keys()
    assert not missing, (place, missing)
    for name, inner in value.items():
        check(inner, known[name], f"{place}.{name}")


def objects(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8")))


def workloads(file: str) -> list[dict[str, Any]]:
    return [one for one in objects(file) if "template" in one["spec"]]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def options_of(workload: dict[str, Any], **values: str) -> tuple[Any, Any, Any]:
    """What `ringcast serve` reads from the container's arguments, with these in its $(...)."""
    (container,) = pod(workload)["containers"]
    assert container["command"] == ["ringcast"]
    command, *words = container["args"]
    assert command == "serve"
    assert values.keys() <= {env["name"] for env in container["env"]}
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert "$(" not in "".join(words)
    parser = make_parser("serve")
    serve.add_arguments(parser)
    args = parser.parse_intermixed_args(words)
    engine, server, cluster = (
        read_options(args, kind) for kind in (EngineConfig, ServerConfig, ClusterConfig)
    )
    return engine, server, cluster


@pytest.mark.parametrize("file", FILES)
def test_every_field_is_one(file: str) -> None:
    for one in objects(file):
        kind = KINDS[one["apiVersion"], one["kind"]]
        check(one, kind, f"{file}: {one['kind']} {one['metadata'].get('name')}")


@pytest.mark.parametrize("file", FILES)
def test_names_fit(file: str) -> None:
    everything = objects(file)
    names = {(one["kind"], one["metadata"]["name"]) for one in everything}
    assert len(names) == len(everything)
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(file)]
    for one in workloads(file):
        spec = one["spec"]
        own = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= own.items()
        assert (
            sum(spec["selector"]["matchLabels"].items() <= other.items() for other in labels) == 1
        )
        if one["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in names
        volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for container in (*pod(one).get("initContainers", []), *pod(one)["containers"]):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= volumes.keys() | claimed
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    for one in everything:
        if one["kind"] == "Service":
            chosen = one["spec"]["selector"].items()
            ports = {
                port["name"]
                for other in workloads(file)
                if chosen <= other["spec"]["template"]["metadata"]["labels"].items()
                for port in pod(other)["containers"][0].get("ports", [])
            }
            assert ports >= {p["targetPort"] for p in one["spec"]["ports"] if "targetPort" in p}


@pytest.mark.parametrize("file", FILES)
def test_who_serves_is_asked_on_its_port_whether_it_does(file: str) -> None:
    serving = [
        one for one in workloads(file) if "--headless" not in pod(one)["containers"][0]["args"]
    ]
    (master,) = serving
    (container,) = pod(master)["containers"]
    engine, server, _ = options_of(master, **({"POD_IP": "10.0.0.1"} if "cluster" in file else {}))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == server.port
    assert server.host == "0.0.0.0"
    paths = {}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[name]["httpGet"]["port"] == "http"
        paths[name] = container[name]["httpGet"]["path"]
    assert list(paths.values()) == ["/health", "/health", "/ready"]
    patience = (
        container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
    )
    assert patience >= engine.startup_timeout
    assert pod(master)["terminationGracePeriodSeconds"] > engine.shutdown_timeout + 5


def test_the_ranks_of_all_hosts_are_all_ranks() -> None:
    master, node = workloads(FILES[1])
    engine, _, cluster = options_of(master, POD_IP="10.0.0.1")
    ranks = list(cluster.local_ranks(engine))
    ports = [port["containerPort"] for port in pod(master)["containers"][0]["ports"]]
    start, replicas = node["spec"]["ordinals"]["start"], node["spec"]["replicas"]
    for number in range(start, start + replicas):
        of_node, _, joined = options_of(node, RANK=str(number))
        assert joined.headless
        assert of_node.model == engine.model
        assert of_node.data_parallel_size == engine.data_parallel_size
        assert joined.data_parallel_rpc_port == cluster.data_parallel_rpc_port
        ranks += joined.local_ranks(of_node)
        assert cluster.port_of(ranks[-1]) in ports
    assert ranks == list(range(engine.data_parallel_size))
    name, service = master["metadata"]["name"], master["spec"]["serviceName"]
    assert joined.data_parallel_address == f"{name}-0.{service}"
    rank = next(env for env in pod(node)["containers"][0]["env"] if env["name"] == "RANK")
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['apps.kubernetes.io/pod-index']"


def test_the_secret_is_its_owners_alone() -> None:
    """--cluster-secret-file refuses what a group may read, as it may a secret's volume."""
    for one in workloads(FILES[1]):
        (copy,) = pod(one)["initContainers"]
        *install, source, target = copy["command"]
        assert install == ["install", "-m", "0400"]
        places = {mount["mountPath"]: mount["name"] for mount in copy["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
        assert "secret" in volumes[places[str(Path(source).parent)]]
        private = volumes[places[str(Path(target).parent)]]
        assert private["emptyDir"]["medium"] == "Memory"
        values = (
            {"RANK": "1"}
            if "--headless" in pod(one)["containers"][0]["args"]
            else {"POD_IP": "::1"}
        )
        assert options_of(one, **values)[2].cluster_secret_file == target
        (container,) = pod(one)["containers"]
        assert private["name"] in {mount["name"] for mount in container["volumeMounts"]}
        assert pod(one)["securityContext"]["runAsUser"] == pod(one)["securityContext"]["fsGroup"]
