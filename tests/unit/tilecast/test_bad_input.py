"""Bad input by rule, verbs x options x values and readers x kinds of files: exit 2, one sentence, nothing written."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.base.data import SHIPPED_KERNELS
from tilecast.cli import main

#: The header of a device ELF, whose tables of sections and segments lie behind it.
_CUBIN = b"\x7fELF\x02\x01\x01\x33" + bytes(8) + (2).to_bytes(2, "little") + (190).to_bytes(2, "little") + bytes(200)

#: Verbs that take the workload options and a machine, with what else they need.
VERBS = {
    "predict": ["b200"], "report": ["b200"], "demand": ["b200"], "schedule": ["b200"], "whatif": ["b200", "--set", "mufu.ex2=32"],
    "sensitivity": ["b200"], "breakeven": ["b200"], "map": ["b200"], "generate": ["b200"], "tune": ["b200", "--no-compile"],
}  # fmt: skip
SHAPES = [
    ("--batch", ("0", "-1", "x", "", "1.5", "9" * 30)),
    ("--heads", ("0", "-8", "many")),
    ("--heads-kv", ("0", "3", "-2")),
    ("--seqlen", ("0", "-5", "1e4", "9" * 30)),
    ("--seqlen-k", ("0", "-1")),
    ("--head-dim", ("0", "127", "8", "4096")),
    ("--head-dim-v", ("7", "0")),
    ("--window", ("a,b", "1,2,3", "-2", "", "9" * 30)),
    ("--dtype", ("bf61", "", "float")),
    ("--preset", ("llama", "")),
]
#: What the verbs with a kernel and a clock take besides.
KERNELS = [
    ("--clock", ("fast", "nan", "inf", "-1", "0", "1e9", "")),
    ("--power", ("much", "nan", "inf", "-1", "0", "30", "1e9", "")),
    ("--family", ("fa9", "")),
    ("--variant", ("tile", "tile_m=x", "nope=1", "family=fa9", "", "scheduler=none", "fa4:cta_group=7", "tile_n=17")),
]
CHANGES = [
    ("--set", ("mufu.ex2", "mufu.ex2=x", "nope=1", "mufu.ex2=-1", "mufu.ex2=nan", "=1")),
    ("--scale", ("smem", "smem=0", "smem=inf", "nope=2")),
]
WITH_KERNEL = [verb for verb in VERBS if verb != "demand"]
WITH_CHANGES = ["whatif", "sensitivity", "breakeven", "map", "report"]
TOGETHER = [
    ("predict", "--family", "fa2", "--variant", "family=fa4"),
    ("generate", "--family", "fa4", "--variant", "fa2:tile_m=64"),
    ("predict", "--window", "1,1", "--causal"),
    ("predict", "--preset", "llama3-8b", "--heads", "6"),
    ("predict", "--heads", "10", "--heads-kv", "4"),
    ("predict", "--machine", "h200"),
    ("predict", "--trace", "t.json", "--shapes", "SHAPES"),
    ("predict", "--measured", "0.95ms", "--shapes", "SHAPES"),
    ("predict", "--seqlen", "64", "--shapes", "SHAPES"),
    ("tune", "-o", "k.py", "--shapes", "SHAPES"),
    ("report", "-o", "r.md", "--markdown", "there"),
    ("generate", "--list", "-o", "k.py"),
]
ALONE = [
    *(("predict", "b200", "--measured", text) for text in ("0.95", "fast", "-1ms", "0ms", "1 parsec", "nanms", "")),
    *(("schedule", "b200", "--time-limit", text) for text in ("0", "-1", "nan", "inf", "x")),
    *(("sensitivity", "b200", "--step", text) for text in ("0", "1e-300", "0.9", "nan", "x")),
    *(("breakeven", "b200", "--fact", text) for text in ("nope", "chip.sm_count")),
    *(("map", "b200", "--grid", text) for text in ("4", "1", "103", "x")),
    *(("map", "b200", "--span", text) for text in ("1", "0", "65", "nan")),
    *(("map", "b200", "--axes", text) for text in ("mufu.ex2", "a,b,c", "mufu.ex2,nope", "mufu.ex2,mufu.ex2", "")),
    *((verb, machine) for verb in VERBS for machine in ("b2000", "", "/none/m.toml")),
    *((verb,) for verb in VERBS if verb not in ("demand", "schedule")),
    ("map", "b200", "--show", ","), ("predict", "b200", "--page", "16"), ("tune", "b200", "--no-compile", "--table", "folder.toml"),
    ("predict", "b200", "--variant", "tile_n=64,tile-n=128"), ("predict", "b200", "--variant", "fa4:family=fa4"),
    ("predict", "b200,,h200"), ("predict", "b200,b200"), ("whatif", "b200"),
    ("demand", "--tile-m", "0"), ("demand", "--tile-n", "x"),
    ("tune", "b200", "--budget", "-1"), ("tune", "b200", "--budget", "9", "--candidates", "3"), ("tune", "b200", "--audit", "a.txt"),
    ("emulate",), ("emulate", "no_such_kernel"), ("emulate", "hopper_ws_d64_full", "--seed", "-1"),
    ("emulate", "hopper_ws_d64_full", "--mode", "early"), ("emulate", "hopper_ws_d64_full", "--sms", "1"),
    ("emulate", "hopper_ws_d64_full", "--seqlen", "0"),
    ("emulate", "hopper_ws_d64_full", "--seqlen", "100000", "--heads", "64", "--batch", "64"),
    ("emulate", "hopper_ws_d64_full", "--machine", "h300"), ("emulate", "x.py", "--call", "f()", "--main"), ("emulate", "x.py", "--main", "--largest", "M"),
    ("inspect", "/dev/zero"), ("forecast", "/dev/zero"), ("generate", "h200", "-o", ""),
    ("inspect", "k.py"), ("measure", "--mode", "fast"), ("measure", "--rounds", "1"), ("measure", "--seqlen", "0"),
    ("sweep",), ("profile",), ("counters",), ("calibrate", "--only", "nope"), ("machine", "show", "h300"),
    ("gemm",), ("gemm", "h200"), ("gemm", "h200", "--m", "64", "--n", "64"), ("gemm", "h300", "--m", "64", "--n", "64", "--k", "64"),
    ("gemm", "h200", "--m", "64", "--n", "64", "--k", "64", "--by-k", "--level", "code"),
    ("gemm", "h200", "--m", "64", "--n", "64", "--k", "64", "--by-k", "-o", "p.py"),
    ("gemm", "h200", "--m", "64", "--n", "64", "--k", "64", "--in-place", "--d-dtype", "fp32"),
    ("gemm", "a100", "--m", "64", "--n", "64", "--k", "64", "--dtype", "fp8"),
    ("step",), ("step", "h200"), ("step", "h300", "--requests", "4x8"), ("step", "h200", "--batch-file", "SHAPES"),
    ("forecast",), ("loops",), ("loops", "h300"), *((verb, "h200", "--level", text) for verb in ("predict", "report", "sensitivity") for text in ("fast", "codes", "")),
    ("machine", "check", "b200"), ("machine", "nope"), ("validate", "nope"), ("validate", "published", "--clock", "noon"),
    ("validate", "experiments", "--clock", "1500"), ("validate", "ablations", "--clock", "1500"), ("validate", "tuner", "--least", "1"), ("--colour",), ("predcit",),
]  # fmt: skip
#: Verbs that read a file of the user's; FILE is where it stands.
READERS = [
    ("machine", "check", "./FILE"), ("predict", "--machine", "./FILE"), ("predict", "b200", "--shapes", "FILE"),
    ("sweep", "FILE"), ("measure", "FILE", "--machine", "h200"), ("profile", "FILE", "-o", "codes.txt"),
    ("emulate", "./FILE"), ("emulate", "FILE", "--call", "main()"), ("forecast", "./FILE"), ("forecast", "FILE", "--call", "main()"),
    ("inspect", "FILE"), ("step", "h200", "--batch-file", "FILE"), ("gemm", "./FILE", "--m", "8", "--n", "8", "--k", "8"), ("validate", "measured", "FILE"), ("validate", "measured", "--code", "FILE"),
    ("validate", "counters", "FILE"), ("validate", "counters", "--code", "FILE"), ("validate", "tuner", "FILE"),
    ("validate", "published", "FILE"), ("validate", "foreign", "FILE"), ("validate", "foreign", "--loops", "FILE"), ("validate", "serving", "FILE"),
    ("validate", "gemm", "FILE"), ("validate", "compare", "FILE"), ("validate", "ablations", "FILE"), ("validate", "ablations", "--code", "FILE"),
]  # fmt: skip
#: Verbs with problems of their own, what else they need, and their options.
OTHERS = {
    ("gemm", "h200", "--m", "64", "--n", "64", "--k", "64"): [
        ("--m", ("0", "-1", "x", "", "1.5", "9" * 30)), ("--n", ("0", "-8", "many", "9" * 30)), ("--k", ("0", "-2", "", "9" * 30)),
        ("--dtype", ("bf61", "", "fp64")), ("--c-dtype", ("bf61", "", "fp8")), ("--d-dtype", ("fp8", "int", "")),
        ("--alpha", ("x", "nan", "inf", "")), ("--beta", ("x", "nan", "inf", "")), ("--level", ("fast", "", "kept")),
        ("--clock", ("fast", "nan", "-1", "0", "1e9", "")), ("--power", ("much", "nan", "-1", "0", "30", "1e9")),
        ("--family", ("fa3", "gem", "gemm_blackwell", "")), ("--set", ("mufu.ex2", "mufu.ex2=x", "nope=1", "=1")),
        ("--variant", ("tile", "tile_m=x", "nope=1", "", "tile_n=17", "stages=0", "stages=99")), ("--scale", ("smem", "smem=0", "nope=2")),
        ("-o", ("none/out.py", "file/out.py")),
    ],
    ("step", "h200", "--requests", "4x1024"): [
        ("--requests", ("0x8", "4x", "x", "", "4x0", "-1x8", "1x512:256", "1x0:5", "9e9x1", "4x" + "9" * 30, "nan", "4*8", ",")),
        ("--page", ("1", "15", "-1", "x", "257", "17", "")), ("--cache", ("bf61", "", "e5m2")), ("--next", ("", "x", "0x1", "4x-1")),
        ("--within", ("20", "fast", "0ms", "-1ms", "nanms", "")), ("--heads", ("0", "-8", "many")), ("--heads-kv", ("0", "3", "-2")),
        ("--head-dim", ("0", "127", "4096")), ("--head-dim-v", ("7", "0")), ("--window", ("a,b", "1,2,3", "-2", "")),
        ("--dtype", ("bf61", "", "float")), ("--preset", ("llama", "")), ("--clock", ("fast", "nan", "-1", "0", "")),
        ("--power", ("much", "nan", "0", "")), ("--set", ("mufu.ex2", "nope=1")), ("--scale", ("smem", "nope=2")),
        ("--variant", ("tile", "nope=1", "", "split_keys=0", "split_keys=x", "family=fa9")), ("--batch-file", ("SHAPES",)),
    ],
    ("loops", "h200"): [
        ("--family", ("fa9", "")), ("--variant", ("tile", "nope=1", "")), ("--most", ("0", "301", "x")),
        ("--workers", ("-1", "257", "x")), ("--seqlen", ("0", "x")), ("--head-dim", ("0", "127")), ("--dtype", ("bf61", "")),
    ],
    ("forecast", str(ROOT / "kernels" / "generated" / "hopper_ws_d64_full.py")): [
        ("--machine", ("h300", "")), ("--arch", ("sm_42", "")), ("--dtype", ("bf61", "")), ("--ctas", ("0", "x", "")),
        ("--iterations", ("0", "x", "5:1", "-1", "", "1:2:3")), ("--ctas-per-sm", ("0", "x")), ("--tiles", ("0", "x", "5")), ("--warps", ("x", "-1", "")),
        ("--set", ("nope=1", "mufu.ex2")), ("--scale", ("nope=2",)), ("--call", ("", "main(")),
    ],
    **{
        (verb, "h200", "--pass", "bwd", *(("--set", "mufu.ex2=32") if verb == "whatif" else ())): [
            ("--seqlen", ("0", "x")), ("--head-dim", ("0", "127", "1024")), ("--heads-kv", ("3",)), ("--dtype", ("bf61", "fp8")),
            ("--clock", ("fast", "0")), ("--power", ("nan",)), ("--family", ("fa9", "")), ("--pass", ("backwards", "")),
            ("--variant", ("tile", "nope=1", "", "family=fa9", "tile_m=17", "fa2_bwd:dq_tile_m=1")),
        ]
        for verb in ("predict", "report", "schedule", "whatif", "sensitivity", "breakeven", "map", "generate", "tune")
    },
}  # fmt: skip
FILES = ("missing.toml", "folder.toml", "binary.toml", "empty.toml", "nested.toml", "circle.toml", "x" * 300)
#: Files with one fault each, by the verb that reads them.
_FACT = 'inherits = "b200"\n[chip]\nsm_count = {{ value = {}, unit = "{}", kind = "spec", source = "x"{} }}\n'
_ROW = "head_dim,seqlen,batch\n128,{},1\n"
_COUNTER = (
    "machine,kernel,variant,dtype,batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim_qk,head_dim_v,mask,window_left,window_right,counter,value\n"
    "h200-sxm,hopper_ws,x,bf16,{},1,1,64,64,64,64,none,-1,-1,cycles,{}\n"
)
_GEMM = "m,n,k,c_dtype,in_place,variant,us\n{},64,64,bf16,0,stages=4,{}\n"
FAULTS: dict[tuple[str, ...], dict[str, str | bytes]] = {
    ("predict", "b200", "--shapes"): {
        "nan.csv": _ROW.format("nan"),
        "inf.csv": _ROW.format("inf"),
        "negative.csv": _ROW.format("-4096"),
        "half.csv": _ROW.format("4096.5"),
        "huge.csv": _ROW.format("9" * 5000),
        "words.csv": _ROW.format("４k"),
        "head.csv": "head_dim,seqlen\n",
        "quote.csv": 'seqlen\n"4096\n',
        "more.csv": "seqlen\n4096,5\n",
        "twice.csv": "seqlen,seqlen\n4096,5\n",
        "semicolon.csv": "seqlen;batch\n4096;1\n",
        "nul.csv": "seqlen\n40\x0096\n",
        "utf16.csv": "seqlen\n4096\n".encode("utf-16"),
        "zipped.csv": gzip.compress(b"seqlen\n4096\n"),
        "zipped.csv.gz": gzip.compress(bytes(90)),
        "maybe.csv": "seqlen,causal\n4096,maybe\n",
        "dtype.csv": "seqlen,dtype\n4096,bf17\n",
        "window.csv": "seqlen,window\n4096,wide\n",
    },
    ("step", "h200", "--batch-file"): {
        "other.csv": "a,b\n1,2\n",
        "nan.csv": "seqlen_q,seqlen_k\n1,nan\n",
        "fewer.csv": "seqlen_q,seqlen_k\n5,3\n",
        "negative.csv": "seqlen_q,seqlen_k\n-1,100\n",
        "huge.csv": "seqlen_q,seqlen_k\n1," + "9" * 30 + "\n",
        "cut.csv.gz": gzip.compress(bytes(range(256)) * 9)[:60],
    },
    ("machine", "check"): {
        "nan.toml": _FACT.format("nan", "SM", ""),
        "inf.toml": _FACT.format("1e400", "SM", ""),
        "negative.toml": _FACT.format("-5", "SM", ""),
        "true.toml": _FACT.format("true", "SM", ""),
        "text.toml": _FACT.format('"many"', "SM", ""),
        "unit.toml": _FACT.format("148", "GHz", ""),
        "range.toml": _FACT.format("148", "SM", ", low = 200, high = 100"),
        "infinite.toml": _FACT.format("148", "SM", ", high = inf"),
        "itself.toml": 'inherits = "itself.toml"\n',
        "number.toml": "inherits = 5\n",
        "flat.toml": 'inherits = "b200"\nchip = 7\n',
        "name.toml": 'inherits = "b200"\n["chíp"]\nsm_count = 3\n',
        "utf16.toml": 'inherits = "b200"'.encode("utf-16"),
    },
    ("inspect", "--arch", "sm_90a"): {
        "exits.py": "raise SystemExit(3)\n",
        "divides.py": "1 / 0\n",
        "asks.py": "import no_such_module_at_all\n",
        "ends.py": "while True\n",
        "nested.py": "x = " + "(" * 3000 + ")" * 3000,
        "other.py": "def f(): pass\n",
        "number.py": "TILECAST = 5\n",
        "nul.py": "x = 1\x00\n",
        "short.cubin": _CUBIN[:20],
        "head.cubin": _CUBIN[:64],
        "beyond.cubin": _CUBIN[:40] + b"\xff" * 24,
        "text.cubin": "hello\n",
        "empty.cubin": "",
    },
    ("forecast", "--machine", "h200"): {
        "exits.py": "raise SystemExit(3)\n",
        "head.cubin": _CUBIN[:64],
        "beyond.cubin": _CUBIN[:40] + b"\xff" * 24,
        "other.py": "def f(): pass\n",
    },
    ("emulate",): {
        "exits.py": "raise SystemExit(3)\n",
        "divides.py": "1 / 0\n",
        "nul.py": "x = 1\x00\n",
        "other.py": "def f(): pass\n",
        "number.py": "TILECAST = 5\n",
        "cut.py": (SHIPPED_KERNELS / "hopper_ws_d64_full.py").read_text().partition("@gluon.jit")[0],
    },
    ("validate", "counters"): {
        "number.csv": _COUNTER.format("many", "9"),
        "short.csv": _COUNTER.format("1", "9").replace(",9\n", "\n"),
    },
    ("validate", "gemm"): {
        "number.csv": _GEMM.format("many", "9"),
        "time.csv": _GEMM.format("64", "soon"),
        "short.csv": _GEMM.format("64", "9").replace(",9\n", "\n"),
    },
    ("validate", "compare"): {"empty.zip": "", "text.zip": "PK\x03\x04", "cut.zip": b"PK\x03\x04" + bytes(200)},
    ("sweep",): {
        "number.toml": "machines = 5\n",
        "text.toml": "machines = ['b200']\nworkloads = 'x'\n",
        "negative.toml": "machines = ['b200']\n[[workloads]]\nseqlen = -1\n",
    },
}
#: Verbs that write, and where they are told to; OUT becomes a place that cannot be written.
WRITERS = [
    ("predict", "b200", "--trace", "OUT.json"), ("report", "b200", "-o", "OUT.html"), ("report", "b200", "-o", "OUT.md"),
    ("map", "b200", "-o", "OUT.svg"), ("generate", "b200", "-o", "OUT.py"), ("tune", "b200", "-o", "OUT.py"),
    ("tune", "b200", "--audit", "OUT.csv"), ("emulate", "hopper_ws_d64_full", "--trace", "OUT.json"),
    ("profile", "plan.toml", "-o", "OUT.txt"), ("counters", "plan.toml", "-o", "OUT.csv"), ("bundle", "-o", "OUT.zip"),
    ("calibrate", "-o", "OUT.toml"), ("validate", "measured", "--picture", "OUT.png"),
    ("validate", "published", "--picture", "OUT.svg"), ("validate", "ablations", "--picture", "OUT.svg"),
]  # fmt: skip
ENDINGS = [
    ("map", "b200", "-o", "m.gif"),
    ("report", "b200", "-o", "r.pdf"),
    ("validate", "measured", "--picture", "x.gif"),
    ("validate", "ablations", "--picture", "x.gif"),
]

CASES = [
    *((verb, *VERBS[verb], option, value) for verb in VERBS for option, values in SHAPES for value in values),
    *((verb, *VERBS[verb], option, value) for verb in WITH_KERNEL for option, values in KERNELS for value in values
      if not (verb == "tune" and option == "--variant" and value == "tile")),
    *((verb, "b200", option, value) for verb in WITH_CHANGES for option, values in CHANGES for value in values),
    *((verb, *VERBS[verb], *rest) for verb, *rest in TOGETHER),
    *((*verb, option, value) for verb, options in OTHERS.items() for option, values in options for value in values),
    *ALONE, *ENDINGS,
    *(tuple(word.replace("FILE", file) for word in reader) for reader in READERS for file in FILES),
    *(tuple(word.replace("OUT", where) for word in writer) for writer in WRITERS for where in ("none/out", "file/out", "x" * 300)),
    *((*verb, f"./{name}") for verb, files in FAULTS.items() for name in files),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a command: files of every wrong kind, and none that a verb may leave."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\x7fELF\x00\xff\xfe\x80")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "nested.toml").write_text("a = " + "[" * 5000)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "circle.toml").symlink_to("circle.toml")
    (tmp_path / "SHAPES").write_text("seqlen\n64\n128\n")
    return tmp_path


def test_there_are_as_many_as_the_review_had() -> None:
    """The review tried 313; the suite tries more, of all verbs."""
    assert len(set(CASES)) >= 1200


def refused(arguments: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    for verb, files in FAULTS.items():
        if arguments[:-1] == verb and (content := files.get(arguments[-1].removeprefix("./"))) is not None:
            (place / arguments[-1]).write_bytes(content.encode() if isinstance(content, str) else content)
    before = sorted(str(p) for p in place.rglob("*"))
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, ""), (arguments, out[:300], err)
    assert err.startswith("tilecast: ") and err.count("\n") == 1 and len(err) > 20, (arguments, err)
    assert "Errno" not in err and "Traceback" not in err, (arguments, err)
    assert sorted(str(p) for p in place.rglob("*")) == before, arguments
    assert (place / "file").read_text() == "kept"
    return err


@pytest.mark.parametrize("verb", sorted({case[0] for case in CASES}))
def test_bad_input_is_one_sentence(verb: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = []
    for case in dict.fromkeys(CASES):
        if case[0] != verb:
            continue
        try:
            refused(case, place, capsys)
        except BaseException as fault:  # every case is tried, and all faults are shown together
            if isinstance(fault, KeyboardInterrupt):
                raise
            capsys.readouterr()
            faults.append(f"{' '.join(case)[:90]}: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    "option",
    ["--seqlen", "--seqlen-k", "--head-dim", "--heads", "--batch", "--window", "--dtype", "--clock", "--power"],
)
def test_a_refusal_names_the_option(option: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"--window": "wide", "--dtype": "bf61", "--clock": "fast"}.get(option, "0")
    assert option in refused(("predict", "b200", option, value), place, capsys)
