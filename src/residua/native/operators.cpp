/* The operators of an exported model, registered with PyTorch from C++: a process that loads this library runs a model
 * compiled by AOTInductor without residua's Python, and without any Python.
 *
 * Only the forward passes, which is what an exported model calls. Written against PyTorch's stable interface for
 * extensions: a library that was built with one version of PyTorch works with later ones. Compiled on demand by
 * operators.py, since the wheel must not depend on PyTorch's headers.
 */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

extern "C" {
int residua_attend(int type, int threads, int64_t tokens, int64_t width, int64_t heads, int64_t sources,
                   int64_t queries, const void *const *source, const void *query, double eps, double scale,
                   int centred, const void *carry_logit, int carry_steps, const void *carry_value, void *const *out,
                   void *lse, void *weights);
int residua_delta_write(int type, int threads, const void *X, const void *k, const void *value, const void *beta,
                        void *out, int64_t rows, int64_t channels, int64_t width, int64_t by_row, int64_t by_channel,
                        double eps);
int residua_mix(int type, int threads, const void *const *sources, const void *weights, void *out, int64_t count,
                int64_t lanes, int64_t rows, int64_t width, int64_t by_lane, int64_t by_source, int64_t by_row,
                int kind);
int residua_remix(int type, int threads, const void *H, const void *weights, const void *onto, void *out, int64_t rows,
                  int64_t streams, int64_t made, int64_t width, int64_t onto_step);
int residua_read_remix(int type, int threads, const void *H, const void *read, const void *weights, void *x, void *out,
                       int64_t rows, int64_t streams, int64_t made, int64_t width, int64_t read_row,
                       int64_t read_stream, int64_t by_row, int64_t by_stream, int64_t by_made);
int residua_normed_project(int type, int threads, const void *x, const void *weight, const void *bias, void *out,
                           int64_t rows, int64_t width, int64_t columns, int64_t centered, double eps);
int residua_shortconv(int type, int threads, const void *x, const void *tail, const void *taps, void *out,
                      int64_t sequences, int64_t tokens, int64_t taps_count, int64_t width);
int residua_sinkhorn(int type, int threads, const void *logits, void *out, int64_t matrices, int64_t size,
                     int64_t iterations);
int residua_token_attend(int type, int threads, const void *q, const void *k, const void *v, const void *cosine,
                         const void *sine, void *out, int64_t sequences, int64_t tokens, int64_t heads, int64_t shared,
                         int64_t width, int64_t causal);
}

namespace {

/* As `library.TYPES` and `library.GRAIN`. */
int type_of(const Tensor &one) {
    switch (one.scalar_type()) {
    case ScalarType::Float:
        return 0;
    case ScalarType::Double:
        return 1;
    case ScalarType::BFloat16:
        return 2;
    default:
        throw std::runtime_error("residua: its kernels take float32, float64 and bfloat16");
    }
}

int threads(int64_t numbers) {
    return (int)std::clamp<int64_t>(numbers >> 18, 1, torch::stable::get_num_threads());
}

void check(int answer) {
    if (answer) {
        throw std::runtime_error("residua: out of memory");
    }
}

/* The type to add up in, as `norm.accumulator`. */
ScalarType wide(const Tensor &one) {
    return one.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor dense(const Tensor &one) { return torch::stable::contiguous(one); }

Tensor dense(const Tensor &one, ScalarType type) { return dense(torch::stable::to(one, type)); }

Tensors dense(const Tensors &several) {
    Tensors found;
    for (const Tensor &one : several) {
        found.push_back(dense(one));
    }
    return found;
}

std::vector<const void *> addresses(const Tensors &several) {
    std::vector<const void *> found;
    for (const Tensor &one : several) {
        found.push_back(one.const_data_ptr());
    }
    return found;
}

std::vector<int64_t> shape(const Tensor &one, int64_t begin, int64_t end) {
    std::vector<int64_t> found;
    for (int64_t axis = begin; axis < end; axis++) {
        found.push_back(one.size(axis));
    }
    return found;
}

std::tuple<Tensor, Tensor> attend(Tensor query, Tensors given, std::optional<Tensor> null, double eps, int64_t heads,
                                  double scale, bool centered) {
    const Tensors sources = dense(given);
    const Tensor &like = sources[0];
    const int64_t width = like.size(-1), tokens = like.numel() / width, count = (int64_t)sources.size();
    query = dense(query, wide(like));
    if (null) {
        null = dense(*null, wide(like));
    }
    std::vector<int64_t> sums = shape(like, 0, like.dim() - 1);
    sums.push_back(heads);
    Tensor out = torch::stable::new_empty(like, shape(like, 0, like.dim()));
    Tensor lse = torch::stable::new_empty(like, sums, wide(like));
    void *const outs[] = {out.mutable_data_ptr()};
    check(residua_attend(type_of(like), threads(like.numel() * count), tokens, width, heads, count, 1,
                         addresses(sources).data(), query.const_data_ptr(), eps, scale, centered,
                         null ? null->const_data_ptr() : nullptr, 0, nullptr, outs, lse.mutable_data_ptr(), nullptr));
    return {out, lse};
}

/* weights [n], [n d], [n b t] or [lane n b t]; their kinds as in mix.c. */
Tensor mix(Tensor weights, Tensors given) {
    const Tensors sources = dense(given);
    const Tensor &like = sources[0];
    weights = dense(weights);
    const int64_t axes = weights.dim(), lanes = axes == 4 ? weights.size(0) : 1, count = (int64_t)sources.size();
    const int64_t width = like.size(-1), rows = width ? like.numel() / width : 0;
    std::vector<int64_t> sizes = shape(like, 0, like.dim());
    if (axes == 4) {
        sizes.insert(sizes.begin(), lanes);
    }
    Tensor out = torch::stable::new_empty(like, sizes);
    if (!out.numel()) {
        return out;
    }
    const int kind = axes == 1 ? 1 : axes == 2 ? 2 : 0;
    const int64_t by_source = kind == 1 ? 1 : kind == 2 ? 0 : rows;
    check(residua_mix(type_of(like), threads(count * lanes * like.numel()), addresses(sources).data(),
                      weights.const_data_ptr(), out.mutable_data_ptr(), count, lanes, rows, width,
                      kind ? 0 : count * rows, by_source, kind ? 0 : 1, kind));
    return out;
}

Tensor delta_write(Tensor X, Tensor k, Tensor value, Tensor beta, double eps) {
    X = dense(X), k = dense(k), value = dense(value), beta = dense(beta);
    Tensor out = torch::stable::new_empty(X, shape(X, 0, X.dim()));
    const int64_t channels = X.size(2), width = X.size(3);
    if (out.numel()) {
        check(residua_delta_write(type_of(X), threads(out.numel()), X.const_data_ptr(), k.const_data_ptr(),
                                  value.const_data_ptr(), beta.const_data_ptr(), out.mutable_data_ptr(),
                                  X.size(0) * X.size(1), channels, width, channels * width, width, eps));
    }
    return out;
}

Tensor remix(Tensor weights, Tensor H) {
    weights = dense(weights), H = dense(H);
    const int64_t made = weights.size(-1);
    Tensor out = torch::stable::new_empty(H, {H.size(0), H.size(1), made, H.size(3)});
    if (out.numel()) {
        check(residua_remix(type_of(H), threads(H.numel() * made), H.const_data_ptr(), weights.const_data_ptr(),
                            nullptr, out.mutable_data_ptr(), H.size(0) * H.size(1), H.size(2), made, H.size(3), 0));
    }
    return out;
}

std::tuple<Tensor, Tensor> read_remix(Tensor read, Tensor weights, Tensor H) {
    read = dense(read), weights = dense(weights), H = dense(H);
    const int64_t streams = H.size(2), made = weights.size(-1), width = H.size(3);
    Tensor x = torch::stable::new_empty(H, {H.size(0), H.size(1), width});
    Tensor out = torch::stable::new_empty(H, {H.size(0), H.size(1), made, width});
    if (x.numel()) {
        check(residua_read_remix(type_of(H), threads(H.numel() * (1 + made)), H.const_data_ptr(),
                                 read.const_data_ptr(), weights.const_data_ptr(), x.mutable_data_ptr(),
                                 out.mutable_data_ptr(), H.size(0) * H.size(1), streams, made, width, streams, 1,
                                 streams * made, made, 1));
    }
    return {x, out};
}

Tensor normed_project(Tensor x, Tensor weight, Tensor bias, double eps, bool centered) {
    x = dense(x), weight = dense(weight), bias = dense(bias);
    const int64_t width = weight.size(0), columns = weight.size(1);
    std::vector<int64_t> sizes = shape(x, 0, x.dim() - 1);
    sizes.push_back(columns);
    Tensor out = torch::stable::new_empty(x, sizes);
    if (out.numel()) {
        check(residua_normed_project(type_of(x), threads(x.numel() * columns), x.const_data_ptr(),
                                     weight.const_data_ptr(), bias.const_data_ptr(), out.mutable_data_ptr(),
                                     x.numel() / width, width, columns, centered, eps));
    }
    return out;
}

Tensor shortconv(Tensor x, Tensor tail, Tensor taps) {
    x = dense(x), tail = dense(tail), taps = dense(taps);
    Tensor out = torch::stable::new_empty(x, shape(x, 0, x.dim()));
    if (out.numel()) {
        check(residua_shortconv(type_of(x), threads(x.numel() * taps.size(0)), x.const_data_ptr(),
                                tail.const_data_ptr(), taps.const_data_ptr(), out.mutable_data_ptr(), x.size(0),
                                x.size(1), taps.size(0), taps.numel() / taps.size(0)));
    }
    return out;
}

Tensor sinkhorn(Tensor logits, int64_t iterations) {
    logits = dense(logits);
    Tensor out = torch::stable::new_empty(logits, shape(logits, 0, logits.dim()));
    const int64_t size = logits.size(-1);
    if (out.numel()) {
        check(residua_sinkhorn(type_of(logits), threads(out.numel() * iterations), logits.const_data_ptr(),
                               out.mutable_data_ptr(), out.numel() / (size * size), size, iterations));
    }
    return out;
}

/* An empty cosine and sine are none. */
Tensor token_attend(Tensor q, Tensor k, Tensor v, Tensor cosine, Tensor sine, int64_t width, bool causal) {
    q = dense(q), k = dense(k), v = dense(v), cosine = dense(cosine), sine = dense(sine);
    Tensor out = torch::stable::new_empty(q, shape(q, 0, q.dim()));
    if (out.numel()) {
        const bool turned = cosine.numel() > 0;
        check(residua_token_attend(type_of(q), threads(q.numel() * q.size(1)), q.const_data_ptr(), k.const_data_ptr(),
                                   v.const_data_ptr(), turned ? cosine.const_data_ptr() : nullptr,
                                   turned ? sine.const_data_ptr() : nullptr, out.mutable_data_ptr(), q.size(0),
                                   q.size(1), q.size(2) / width, k.size(2) / width, width, causal));
    }
    return out;
}

} // namespace

/* As the Python side declares them; tests/native/test_operators.py compares. */
STABLE_TORCH_LIBRARY(residua, library) {
    library.def("attend(Tensor query, Tensor[] sources, Tensor? null, float eps, int heads, float scale, "
                "bool centered) -> (Tensor, Tensor)");
    library.def("mix(Tensor weights, Tensor[] sources) -> Tensor");
    library.def("delta_write(Tensor X, Tensor k, Tensor value, Tensor beta, float eps) -> Tensor");
    library.def("remix(Tensor weights, Tensor H) -> Tensor");
    library.def("read_remix(Tensor read, Tensor weights, Tensor H) -> (Tensor, Tensor)");
    library.def("normed_project(Tensor x, Tensor weight, Tensor bias, float eps, bool centered) -> Tensor");
    library.def("shortconv(Tensor x, Tensor tail, Tensor taps) -> Tensor");
    library.def("sinkhorn(Tensor logits, int iterations) -> Tensor");
    library.def("token_attend(Tensor q, Tensor k, Tensor v, Tensor cosine, Tensor sine, int width, bool causal) "
                "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(residua, CPU, library) {
    library.impl("attend", TORCH_BOX(&attend));
    library.impl("mix", TORCH_BOX(&mix));
    library.impl("delta_write", TORCH_BOX(&delta_write));
    library.impl("remix", TORCH_BOX(&remix));
    library.impl("read_remix", TORCH_BOX(&read_remix));
    library.impl("normed_project", TORCH_BOX(&normed_project));
    library.impl("shortconv", TORCH_BOX(&shortconv));
    library.impl("sinkhorn", TORCH_BOX(&sinkhorn));
    library.impl("token_attend", TORCH_BOX(&token_attend));
}
