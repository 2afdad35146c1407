"""What a listing does: values of registers, roles of warps, loops, barriers, copies, matrix instructions."""
