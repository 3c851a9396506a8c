"""The backward passes beside every peer that is installed, in one process, on the same inputs, timed the same way:

    python asv_bench/peers.py [--norm rmsnorm layernorm] [--n N,N,…] [--rows M | --data MB | --field] [--dtype D]
                              [--w-dtype D] [--peers NAME,…] [--csv FILE] [--plot FILE.png] [--device cuda|numpy]
                              [--repeats R]

With --field the cases are those that the field is compared by, in benchmarks and models, of several dtypes (FIELD).

Each result is held against float64 before it is timed by `cupynorm.bench.time_call`. GB/s count the bytes that the
work needs. "-" stands where a peer refuses a shape or gives a wrong result; the reasons follow the table, as do the
peers that are not installed. With both norms --plot draws two pictures, FILE-rmsnorm.png and FILE-layernorm.png.

eager      the formula in PyTorch's tensor operations, differentiated by autograd
compile    the same under torch.compile
aten       PyTorch's fused operators: _fused_rms_norm_backward, native_layer_norm_backward
liger      liger_kernel.ops
quack      quack.rmsnorm
cudnn      a graph of the cuDNN frontend
apex       apex.normalization, through autograd
te         transformer_engine_torch

aten and apex take one dtype only, so w is given to them in x's. On the CPU (--device numpy) only PyTorch's own run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm import bench, report

ROOT = Path(__file__).resolve().parent.parent
NORMS = ("rmsnorm", "layernorm")
COLUMNS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# Shapes by norm and dtypes of x and w, as benchmarks and models have them.
FIELD: dict[tuple[str, str, str], tuple[tuple[int, int], ...]] = {
    ("rmsnorm", "bfloat16", "float32"): (  # PyTorch's benchmarks of norms
        *((32768, n) for n in COLUMNS),
        *((16384, 131072), (8192, 262144), (576000, 384), (1152000, 512)),
    ),
    ("rmsnorm", "bfloat16", "bfloat16"): (  # language models in training, the heads of attention, few rows
        *((16384, 4096), (8192, 8192), (8192, 5120), (4096, 8192), (2048, 4096), (4096, 2048)),
        *((131072, 128), (8192, 128)),
        *((1, 1024), (1, 4096), (1, 8192), (1024, 1024), (1024, 4096), (1024, 8192)),
    ),
    ("rmsnorm", "float16", "float16"): ((4096, 128), (4096, 768)),
    ("rmsnorm", "float32", "float32"): ((32768, 1024), (32768, 16384)),
    ("layernorm", "bfloat16", "float32"): (  # PyTorch's
        *((32768, n) for n in COLUMNS),
        *((16384, 131072), (576000, 384), (1152000, 512)),
    ),
    ("layernorm", "bfloat16", "bfloat16"): ((1024, 12288),),
    ("layernorm", "float16", "float16"): tuple(  # of Triton's tutorial
        (4096, n) for n in (1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288)
    ),
    ("layernorm", "float32", "float32"): ((32768, 1024), (32768, 16384)),
}

# The relative L2 error up to which a peer's result is its dtype's and not wrong: several roundings of x's dtype, and
# for float32 plain sums over many rows.
LARGEST_ERROR = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5, "float64": 1e-10}

Gradients = tuple[Any, ...]
Call = Callable[[], Gradients]


@dataclass(frozen=True)
class Inputs:
    """One case's tensors, in PyTorch, sharing memory with the arrays that cupynorm gets."""

    case: bench.Case
    x: Any
    w: Any
    dy: Any
    rstd: Any
    mean: Any  # None for RMSNorm

    @property
    def columns(self) -> int:
        return self.case.columns

    @property
    def is_layernorm(self) -> bool:
        return self.case.norm == "layernorm"

    @property
    def bias(self) -> Any:
        """A forward pass's b, of which no gradient depends."""
        import torch

        return torch.zeros_like(self.w)


@dataclass(frozen=True)
class Result:
    """What became of one peer on one case: a time, or the reason why there is none."""

    case: bench.Case
    peer: str
    seconds: float = float("nan")
    errors: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def gbps(self) -> float:
        return self.case.bytes / self.seconds / 1e9


# --- the peers: from the inputs to a call of nothing but the backward pass --------------------------------


def formula(x: Any, w: Any, b: Any, layernorm: bool) -> Any:
    x32 = x.float() if x.element_size() < 4 else x
    if layernorm:
        centered = x32 - x32.mean(-1, keepdim=True)
        x_hat = centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (x_hat * w + b).to(x.dtype)
    return (x32 * (x32.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w).to(x.dtype)


def differentiated(forward: Callable[..., Any], inputs: Inputs, w: Any) -> Call:
    """The backward pass that autograd has for forward(x, w, b)."""
    import torch

    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.x, w, torch.zeros_like(w))]
    used = leaves if inputs.is_layernorm else leaves[:2]
    y = forward(*leaves)
    return lambda: torch.autograd.grad(y, used, inputs.dy, retain_graph=True)


def eager(inputs: Inputs) -> Call:
    return differentiated(lambda x, w, b: formula(x, w, b, inputs.is_layernorm), inputs, inputs.w)


def compiled(inputs: Inputs) -> Call:
    import torch

    torch.compiler.reset()
    forward = torch.compile(formula, dynamic=False)
    return differentiated(lambda x, w, b: forward(x, w, b, inputs.is_layernorm), inputs, inputs.w)


def aten(inputs: Inputs) -> Call:
    import torch

    w, b = inputs.w.to(inputs.x.dtype), inputs.bias.to(inputs.x.dtype)
    shape, x, dy, rstd = [inputs.columns], inputs.x, inputs.dy, inputs.rstd[:, None]
    if inputs.is_layernorm:
        mean, operator = inputs.mean[:, None], torch.ops.aten.native_layer_norm_backward
        return lambda: operator(dy, x, shape, mean, rstd, w, b, [True, True, True])
    return lambda: torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd, w, [True, True])


def liger(inputs: Inputs) -> Call:
    utils = importlib.import_module("liger_kernel.ops.utils")
    x, w, dy, rstd = inputs.x, inputs.w, inputs.dy, inputs.rstd
    if inputs.is_layernorm:
        backward, b = importlib.import_module("liger_kernel.ops.layer_norm").layer_norm_backward, inputs.bias
        return lambda: backward(dy, x, w, b, inputs.mean, rstd)
    rms = importlib.import_module("liger_kernel.ops.rms_norm")
    block, warps = utils.calculate_settings(inputs.columns)
    casting = rms._str_to_casting_mode["gemma"]  # all arithmetic in float32
    return lambda: rms.rms_norm_backward(dy, x, w, rstd, 0.0, casting, block, warps, False, None)


def quack(inputs: Inputs) -> Call:
    module = importlib.import_module("quack.rmsnorm")
    x, w, dy, rstd = inputs.x, inputs.w, inputs.dy, inputs.rstd
    if inputs.is_layernorm:
        return lambda: module.layernorm_bwd(x, w, dy, rstd, inputs.mean)
    return lambda: module.rmsnorm_bwd(x, w, dy, rstd)[:2]


def cudnn(inputs: Inputs) -> Call:
    import torch

    frontend: Any = importlib.import_module("cudnn")
    types = {
        torch.float16: frontend.data_type.HALF,
        torch.bfloat16: frontend.data_type.BFLOAT16,
        torch.float32: frontend.data_type.FLOAT,
    }
    handle = frontend.create_handle()
    frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = frontend.pygraph(
        handle=handle,
        intermediate_data_type=frontend.data_type.FLOAT,
        compute_data_type=frontend.data_type.FLOAT,
    )
    rows, columns = inputs.x.shape

    def node(name: str, tensor: Any, shape: tuple[int, ...]) -> Any:
        stride = [shape[1], 1, shape[1], shape[1]]  # four axes, the second contiguous
        return graph.tensor(name=name, dim=list(shape), stride=stride, data_type=types[tensor.dtype])

    wide, row, column = (rows, columns, 1, 1), (1, columns, 1, 1), (rows, 1, 1, 1)
    nodes = {
        "grad": (node("grad", inputs.dy, wide), inputs.dy),
        "input": (node("input", inputs.x, wide), inputs.x),
        "scale": (node("scale", inputs.w, row), inputs.w),
        "inv_variance": (node("inv_variance", inputs.rstd, column), inputs.rstd),
    }
    if inputs.is_layernorm:
        nodes["mean"] = (node("mean", inputs.mean, column), inputs.mean)
        outputs = graph.layernorm_backward(name="backward", **{name: each for name, (each, _) in nodes.items()})
    else:
        arguments = {name: each for name, (each, _) in nodes.items()}
        outputs = graph.rmsnorm_backward(name="backward", has_dbias=False, **arguments)[:2]
    for output, like in zip(outputs, (inputs.x, inputs.w, inputs.w), strict=False):
        output.set_output(True).set_data_type(types[like.dtype])
    graph.build([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=inputs.x.device)

    def call() -> Gradients:
        gradients = [torch.empty_like(like) for like in (inputs.x, inputs.w, inputs.w)[: len(outputs)]]
        tensors = dict(nodes.values()) | dict(zip(outputs, gradients, strict=True))
        graph.execute(tensors, workspace, handle=handle)
        return tuple(gradients)

    return call


def apex(inputs: Inputs) -> Call:
    norms: Any = importlib.import_module("apex.normalization.fused_layer_norm")
    shape, w = (inputs.columns,), inputs.w.to(inputs.x.dtype)
    if inputs.is_layernorm:
        return differentiated(lambda x, w, b: norms.fused_layer_norm_affine(x, w, b, shape, 1e-5), inputs, w)
    return differentiated(lambda x, w, b: norms.fused_rms_norm_affine(x, w, shape, 1e-6), inputs, w)


def transformer_engine(inputs: Inputs) -> Call:
    importlib.import_module("transformer_engine.pytorch")
    torch_part: Any = importlib.import_module("transformer_engine_torch")
    x, w, dy, rstd = inputs.x, inputs.w, inputs.dy, inputs.rstd
    if inputs.is_layernorm:
        return lambda: tuple(torch_part.layernorm_bwd(dy, x, inputs.mean, rstd, w, 0, False))
    return lambda: tuple(torch_part.rmsnorm_bwd(dy, x, rstd, w, 0, False))


# name: how it is called, the module that must be there, the package whose version is told, whether the CPU will do
PEERS: dict[str, tuple[Callable[[Inputs], Call], str, str, bool]] = {
    "eager": (eager, "torch", "torch", True),
    "compile": (compiled, "torch", "torch", True),
    "aten": (aten, "torch", "torch", True),
    "liger": (liger, "liger_kernel.ops", "liger-kernel", False),
    "quack": (quack, "quack.rmsnorm", "quack-kernels", False),
    "cudnn": (cudnn, "cudnn", "nvidia-cudnn-frontend", False),
    "apex": (apex, "apex.normalization.fused_layer_norm", "apex", False),
    "te": (transformer_engine, "transformer_engine.pytorch", "transformer-engine", False),
}
OURS = "cupynorm"


def absences(names: Sequence[str], cuda: bool) -> dict[str, str]:
    """Why a peer cannot take part at all."""
    reasons = {}
    for name in names:
        _, module, _, on_host = PEERS[name]
        if not (cuda or on_host):
            reasons[name] = "needs CUDA"
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a package that is half there can raise anything
            reasons[name] = one_line(error)
    return reasons


# --- measuring --------------------------------------------------------------------------------------------


def measure(case: bench.Case, peers: Sequence[str], xp: Any, repeats: int | None) -> Iterator[Result]:
    """cupynorm's result, then each peer's."""
    arrays = bench.make_inputs(case, xp)
    yield attempt(case, OURS, arrays, lambda: lambda: bench.call(case, arrays), xp, repeats)
    if not peers:
        return
    tensors = {name: to_torch(array) for name, array in arrays.items() if name != "has_bias"}
    inputs = Inputs(case, tensors["x"], tensors["w"], tensors["dy"], tensors["rstd"], tensors.get("mean"))
    for peer in peers:
        prepare = PEERS[peer][0]
        yield attempt(case, peer, arrays, lambda prepare=prepare: prepare(inputs), xp, repeats)  # type: ignore[misc]
        free(xp)


def attempt(
    case: bench.Case, peer: str, arrays: dict[str, Any], prepare: Callable[[], Call], xp: Any, repeats: int | None
) -> Result:
    from cupynorm import accuracy

    try:
        call = prepare()
        outputs = tuple(to_array(output, xp) for output in call()[: len(case.output_names)])
        errors = {each.name: each.error for each in accuracy.check(case, arrays, outputs, xp)}
        del outputs
        for name, error in errors.items():
            if not error <= LARGEST_ERROR[case.dtype.name]:  # NaN is wrong, too
                return Result(case, peer, errors=errors, reason=f"{name} is off by {error:.1e}: not timed")
        return Result(case, peer, bench.time_call(call, xp, repeats), errors)
    except Exception as error:  # whatever a peer raises on this shape
        return Result(case, peer, reason=one_line(error))


def to_torch(array: Any) -> Any:
    import torch

    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":  # of which torch's exchange with NumPy knows nothing
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(output: Any, xp: Any) -> Any:
    if isinstance(output, xp.ndarray):
        return output
    output = output.detach()
    if xp is not np:
        return xp.from_dlpack(output.contiguous())
    if str(output.dtype) == "torch.bfloat16":
        import torch

        return output.contiguous().view(torch.int16).numpy().view(bench.dtype_of("bfloat16"))
    return output.numpy()


def free(xp: Any) -> None:
    """Hands memory that nobody uses back to the device, where the next peer's allocator may look for it."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "…"


# --- what is printed and written --------------------------------------------------------------------------


def about(xp: Any, peers: Sequence[str]) -> list[str]:
    """Date, device, commit and versions."""
    from cupynorm import __version__, cli

    packages = ["numpy", "torch", "triton", *(PEERS[name][2] for name in peers)]
    packages += [] if xp is np else ["cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"]
    versions = {name: cli.version(name) for name in dict.fromkeys(packages)}
    lines = [
        f"{datetime.date.today().isoformat()}, {bench.device_name(xp)}",
        f"cupynorm {__version__}, commit {commit()}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]
    if xp is not np:
        runtime = xp.cuda.runtime
        driver, library = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        lines[0] += "".join(
            f", {name} {number // 1000}.{number % 1000 // 10}"
            for name, number in (("driver for CUDA", driver), ("CUDA runtime", library))
        )
    return lines


def commit() -> str:
    """Of this checkout, and whether it has changes; unknown, if cupynorm is found elsewhere."""
    if not Path(bench.__file__).resolve().is_relative_to(ROOT):
        return f"unknown: {Path(bench.__file__).parent}"
    try:
        git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changes else "")


def markdown(results: Sequence[Result], triads: dict[bench.Case, bench.Triad], peers: Sequence[str]) -> str:
    """A row for each case: GB/s of everyone, and ours beside the best peer's."""
    names = [OURS, *peers]
    head = ["op", "M x N", "dtype x/w", "triad", *names, f"{OURS} / best peer", f"{OURS} / triad"]
    lines = [head, ["---"] * len(head)]
    for case, triad in triads.items():
        speeds = {result.peer: result.gbps for result in results if result.case == case and not result.reason}
        others = [speed for name, speed in speeds.items() if name != OURS]
        ours = speeds.get(OURS)
        beside = f"{ours / max(others):.2f}" if ours and others else "-"
        share = f"{ours / triad.gbps:.3f}" if ours else "-"
        cells = [report.gbps(speeds[name]) if name in speeds else "-" for name in names]
        lines.append([case.op, case.shape, case.dtypes, report.gbps(triad.gbps), *cells, beside, share])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


CSV_HEAD = "op rows columns dtype w_dtype peer seconds bytes gbps triad_gbps error_dx error_dw error_db reason".split()


def write_csv(
    path: Path, header: Sequence[str], results: Sequence[Result], triads: dict[bench.Case, bench.Triad]
) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in header)
        writer = csv.writer(file)
        writer.writerow(CSV_HEAD)
        for result in results:
            case = result.case
            errors = [f"{result.errors[name]:.3e}" if name in result.errors else "" for name in ("dx", "dw", "db")]
            figures = (
                ["", case.bytes, ""] if result.reason else [f"{result.seconds:.9f}", case.bytes, f"{result.gbps:.2f}"]
            )
            writer.writerow([
                case.op, case.rows, case.columns, case.dtype.name, case.w_dtype.name, result.peer,
                *figures, f"{triads[case].gbps:.2f}", *errors, result.reason,
            ])  # fmt: skip


def draw(
    path: Path,
    file_format: str,
    norm: str,
    header: Sequence[str],
    results: Sequence[Result],
    triads: dict[bench.Case, bench.Triad],
) -> None:
    lines: report.Lines = {}
    for result in results:
        if result.case.norm == norm and not result.reason:
            lines.setdefault(result.peer, []).append((result.case.columns, result.gbps))
    cases = [case for case in triads if case.norm == norm]
    ceiling = [(case.columns, triads[case].gbps) for case in cases]
    name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[norm]
    rows = {case.rows for case in cases}
    size = f"{rows.pop()} rows" if len(rows) == 1 else "rows by data"
    title = f"{name} backward, {cases[0].dtypes}, {size}"
    report.draw(path, file_format, title, lines, {report.TRIAD: ceiling}, "\n".join(header))


# --- the command ------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("peers.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    from cupynorm import cli

    if options.field and (options.dtype or options.w_dtype or options.plot):
        raise cli.UsageError("--field has its own dtypes, and no picture: no --dtype, --w-dtype or --plot beside it")
    if options.csv and options.plot and options.csv.resolve() == options.plot.resolve():
        raise cli.UsageError(f"--csv and --plot both name {options.csv}")
    try:
        cases = cases_of(options)
    except ValueError as error:  # bfloat16 without its package
        raise cli.UsageError(str(error)) from None
    if not cases:
        raise cli.UsageError("argument --n: --field has no rows of these lengths")
    with ExitStack() as files:
        pictures = {}
        if options.plot:
            file_format = cli.plot_format(options.plot)
            for norm in options.norm:
                ending = f"-{norm}{options.plot.suffix}" if len(options.norm) > 1 else options.plot.suffix
                picture = options.plot.with_name(f"{options.plot.stem}{ending}")
                pictures[norm] = cli.writable(files, "--plot", picture)
        table = cli.writable(files, "--csv", options.csv)
        if options.field and options.device is None:
            cli.needed_cupy()  # its cases are a GPU's: on a CPU they take hours
        xp, _ = cli.pick_device(options.device)
        absent = absences(options.peers, xp is not np)
        present = [name for name in options.peers if name not in absent]
        header = about(xp, present)
        triads: dict[bench.Case, bench.Triad] = {}
        results: list[Result] = []
        for case in report.progress(cases, lambda case: f"{case.op} {case.shape} {case.dtypes}"):
            triads[case] = bench.measure_triad(case.rows * case.columns, case.dtype, xp, options.repeats)
            results += measure(case, present, xp, options.repeats)
            free(xp)
        if table:
            write_csv(table, header, results, triads)
        for norm, picture in pictures.items():
            assert picture is not None
            draw(picture, file_format, norm, header, results, triads)
    print("\n".join(header), end="\n\n")
    print(markdown(results, triads, present))
    print("\nGB/s of the bytes that the work needs; triad: z = x + dy. aten and apex are given w in x's dtype.")
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    for result in results:
        if result.reason:
            print(f"-: {result.case.op} {result.case.shape} {result.case.dtypes} {result.peer}: {result.reason}")
    return 0


def cases_of(options: argparse.Namespace) -> list[bench.Case]:
    if options.field:
        return [
            bench.case(f"{norm}_backward", rows, columns, dtype, w_dtype)
            for (norm, dtype, w_dtype), shapes in FIELD.items()
            for rows, columns in shapes
            if norm in options.norm and (options.n is None or columns in options.n)
        ]
    dtype = bench.dtype_of(options.dtype or "bfloat16")
    return [
        bench.case(f"{norm}_backward", rows_of(options, columns, dtype), columns, dtype, options.w_dtype)
        for norm in options.norm
        for columns in options.n or COLUMNS
    ]


def rows_of(options: argparse.Namespace, columns: int, dtype: np.dtype[Any]) -> int:
    rows: int = options.rows
    return rows if options.data is None else max(1, round(options.data * 1e6 / (3 * columns * dtype.itemsize)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from cupynorm import cli

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(cli.positive(item, int) for item in text.split(",")))

    def number(text: str) -> int:
        return cli.positive(text, int)

    def megabytes(text: str) -> float:
        return cli.positive(text, float)

    def names(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in PEERS:
                raise argparse.ArgumentTypeError(f"unknown peer {name!r}; one of {', '.join(PEERS)} is needed")
        return tuple(dict.fromkeys(text.split(",")))

    parser = cli.Parser(prog="peers.py", description="The backward passes beside every peer that is installed.")
    parser.add_argument("--norm", nargs="+", choices=NORMS, default=list(NORMS), help="default: both")
    parser.add_argument(
        "--n", type=numbers, metavar="N,...", help="row lengths; default: 256 to 65536, with --field all"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--rows", type=number, default=32768, metavar="M", help="default: 32768")
    size.add_argument("--data", type=megabytes, metavar="MB", help="rows such that x, dy and dx have so many MB")
    size.add_argument("--field", action="store_true", help="rows and dtypes of the peers' benchmarks and of models")
    parser.add_argument("--dtype", type=cli.dtype, help="of x and dy; default: bfloat16")
    parser.add_argument("--w-dtype", type=cli.dtype, help="of w; default: float32, float64 with float64")
    parser.add_argument("--peers", type=names, default=tuple(PEERS), metavar="NAME,...", help=", ".join(PEERS))
    parser.add_argument("--device", choices=("cuda", "numpy"), help="default: CUDA if a device answers, else NumPy")
    parser.add_argument("--repeats", type=number, metavar="R", help="timed calls; default: as cupynorm.bench")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw GB/s against N there (needs matplotlib)")
    options = parser.parse_args(arguments)
    options.norm = list(dict.fromkeys(options.norm))
    return options


if __name__ == "__main__":
    sys.exit(main())
