"""Puts kernels_cu/ into a wheel's package; in a checkout, and an editable install of it, it lies beside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithKernels(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "cupynorm", "kernels_cu")
            folder.mkdir(parents=True, exist_ok=True)
            for source in sorted(Path("kernels_cu").glob("*.cu*")):
                self.copy_file(str(source), str(folder / source.name))


setup(cmdclass={"build_py": WithKernels})
