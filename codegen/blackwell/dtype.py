"""What the type of Q, K and V decides in a `blackwell_ws` kernel: 16 bits, or 8 with P in e4m3, O in bf16 and factors of heads."""

from __future__ import annotations

from tilecast.codegen.gluon import OUTPUT_ARGUMENTS, GluonKernel
from tilecast.model.kernel import e4m3

#: Tensors that have factors in 8 bits.
_DESCALED = "qkv"


class TypedKernel(GluonKernel):
    """Names and expressions that follow from the type."""

    __slots__ = ()

    #: Whether Q, K and V have 8 bits an element, and the octaves that a row may outgrow its reference by.
    fp8: bool
    rescale_threshold: float

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return 1 if self.fp8 else 2

    @property
    def factor_sizes(self) -> tuple[str, ...]:
        """In 8 bits, how far apart the factors of heads lie."""
        return tuple(f"{x}_step" for x in _DESCALED) if self.fp8 else ()

    @property
    def host_arguments(self) -> str:
        """The kernel's arguments after the tensors, but the scale, as the host passes them."""
        return ", ".join((OUTPUT_ARGUMENTS, *self.last_arguments[:-1]))

    @property
    def last_arguments(self) -> tuple[str, ...]:
        """In 8 bits factors come before the scale, or None."""
        return (*(f"{x}_descale" for x in _DESCALED), "scale_log2") if self.fp8 else ("scale_log2",)

    @property
    def worked_out(self) -> tuple[tuple[str, str], ...]:
        """In 8 bits, what O of a head is to be multiplied by."""
        return (("o_factor", "1.0"),) if self.fp8 else ()

    @property
    def dtype_constants(self) -> tuple[str, ...]:
        """Statements that name the types of the inputs, and in 8 bits the type and the range of P."""
        if not self.fp8:
            return ('DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}',)
        lift = e4m3.OCTAVES - self.rescale_threshold
        return (
            f"LIFT = gl.constexpr({lift})  # exponentials start at 2^{lift:g} and may grow to 2^{e4m3.OCTAVES}: e4m3 reaches from 2^-9 to 448",
            "P_DTYPE = gl.constexpr(gl.float8e4nv)",
            'DTYPES = {"torch.float8_e4m3fn": gl.float8e4nv, "torch.float8_e5m2": gl.float8e5}',
        )

    @property
    def of_head(self) -> str:
        """In 8 bits, the statement that makes the problem of a launch that of a head."""
        return "problem = of_head(launched, batch, head)"

    @property
    def launched(self) -> str:
        """What roles of softmax and correction call the launch: in 8 bits each head has a scale of its own."""
        return "launched" if self.fp8 else "problem"

    @property
    def not_copied(self) -> int:
        """Of what roles know, how much at the end they need no copy of."""
        return len(self.last_arguments) + len(self.worked_out)

    @property
    def p_columns(self) -> str:
        """Columns of S that P lies in."""
        return "TILE_N // 4" if self.fp8 else "TILE_N // 2"

    @property
    def p_text(self) -> str:
        """Where that is."""
        return "the right quarter" if self.fp8 else "the right half"
