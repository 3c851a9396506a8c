// A block's part of a row on the split routes: blockIdx.x is the slab, gridDim.x of which make up a row.
#pragma once

struct Slab {
    int first_column, columns;

    template <class Arguments>
    __device__ explicit Slab(const Arguments& a)
        : first_column(blockIdx.x * a.slab_columns), columns(minimum(a.slab_columns, a.columns - first_column)) {}
};
