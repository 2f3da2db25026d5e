"""Builds the C++ operators into the wheel (an editable one, too); without a compiler the wheel is pure Python."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOperators(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root) / "src/paceline/ops/native/build.py"
        spec = importlib.util.spec_from_file_location("paceline_build", path)
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            left_out = native.build()
        except native.BuildError as error:
            self.app.display_warning(f"native operators not built ({error}): torch does their work")
            return
        if left_out:
            self.app.display_warning(f"native operators built without {', '.join(left_out)}: the compiler is too old")
        build_data["artifacts"].append(str(native.LIBRARY.relative_to(self.root)))
        build_data["pure_python"] = False
        # a plain C interface: any Python, one platform
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
