// A mixture of experts: each token's rows through the few it chooses. Their products are those of
// linear.cpp, one expert after the other, over all tokens that chose it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "../handles.h"
#include "kept_room.h"
#include "linear.h"
#include "residency.h"

namespace kvq {
namespace {

// What shares of sigmoids are divided by beside their sum: kvq/reference/experts.py.
constexpr float kLeastSum = 1e-6f;

struct Choice {
    int32_t token;
    float share;
};

// What mixtures keep between them.
struct Scratch {
    std::vector<int32_t> order;
    std::vector<float> weights, x, inner, found;
    std::vector<int> chosen;
    std::vector<std::vector<Choice>> choices;  // by expert, in the order of tokens
};

class Mixture {
public:
    Mixture(const kvq_experts& call, const Parallel& pool, Scratch& scratch, Residency* residency)
        : call_(call), pool_(pool), scratch_(scratch), residency_(residency) {}

    int run() {
        route();
        if (const int status = choose()) return status;
        const size_t columns = call_.gate_up.columns, bytes = sizeof(float) * columns;
        std::memset(call_.out, 0, bytes * call_.tokens);
        for (int expert = 0; expert < call_.count; expert++)
            if (const int status = feed(expert)) return status;
        if (call_.residual)
            for (size_t i = 0; i < columns * call_.tokens; i++) call_.out[i] += call_.residual[i];
        return KVQ_OK;
    }

private:
    // Every token's experts and their shares.
    void route() {
        scratch_.choices.resize(call_.count);
        for (auto& choices : scratch_.choices) choices.clear();
        scratch_.order.resize(call_.count);
        scratch_.weights.resize(call_.count);
        for (int t = 0; t < call_.tokens; t++) route(t, call_.logits + size_t(t) * call_.count);
    }

    void route(int token, const float* logits) {
        int32_t* order = scratch_.order.data();
        float* weights = scratch_.weights.data();
        std::iota(order, order + call_.count, 0);
        // A token that is not finite goes somewhere, and its shares say that it is not.
        const bool sigmoid = call_.scoring == KVQ_SIGMOID;
        for (int i = 0; sigmoid && i < call_.count; i++)
            weights[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        const float* bias = call_.choice_bias;
        const auto key = [=](int32_t i) {
            const float score = sigmoid ? weights[i] + (bias ? bias[i] : 0.0f) : logits[i];
            return std::isnan(score) ? INFINITY : score;
        };
        std::partial_sort(order, order + call_.chosen, order + call_.count,
                          [&](int32_t a, int32_t b) {
                              return key(a) > key(b) || (key(a) == key(b) && a < b);
                          });
        const float top = logits[order[0]];
        for (int i = 0; !sigmoid && i < call_.count; i++) weights[i] = std::exp(logits[i] - top);
        float sum = 0;
        if (call_.normalised)
            for (int i = 0; i < call_.chosen; i++) sum += weights[order[i]];
        else
            for (int i = 0; !sigmoid && i < call_.count; i++) sum += weights[i];
        // Sigmoids need not add up to anything.
        if (sigmoid) sum = call_.normalised ? sum + kLeastSum : 1.0f;
        for (int i = 0; i < call_.chosen; i++)
            scratch_.choices[order[i]].push_back({token, weights[order[i]] / sum});
    }

    // Tells which experts will be read, where a budget bounds them.
    int choose() {
        if (!residency_) return KVQ_OK;
        if (const int status = residency_->find_layer(call_, layer_)) return status;
        std::vector<int>& chosen = scratch_.chosen;
        chosen.clear();
        for (int expert = 0; expert < call_.count; expert++)
            if (!scratch_.choices[expert].empty()) chosen.push_back(expert);
        residency_->choose(*layer_, chosen);
        return KVQ_OK;
    }

    // Adds to `out` what one expert makes of the tokens that chose it.
    int feed(int expert) {
        const std::vector<Choice>& choices = scratch_.choices[expert];
        if (choices.empty()) return KVQ_OK;
        if (residency_) residency_->enter(*layer_, expert);
        const size_t columns = call_.gate_up.columns, count = choices.size();
        float* x = grown(scratch_.x, count * columns);
        float* inner = grown(scratch_.inner, count * call_.gate_up.rows);
        float* found = grown(scratch_.found, count * columns);
        for (size_t i = 0; i < count; i++)
            std::copy_n(call_.x + choices[i].token * columns, columns, x + i * columns);
        int status = multiply(call_.gate_up, call_.gate_up_panels, call_.gate_up_bias, expert,
                              KVQ_PLAIN, x, inner, count);
        if (!status)
            status = multiply(call_.down, call_.down_panels, call_.down_bias, expert,
                              call_.activation, inner, found, count);
        if (residency_) residency_->leave(*layer_, expert);
        if (status) return status;
        for (size_t i = 0; i < count; i++) {
            float* out = call_.out + choices[i].token * columns;
            for (size_t c = 0; c < columns; c++) out[c] += choices[i].share * found[i * columns + c];
        }
        return KVQ_OK;
    }

    int multiply(const kvq_matrix& matrix, const uint8_t* panels, const float* bias, int expert,
                 int activation, const float* x, float* out, size_t tokens) {
        const PanelLayout layout(matrix);
        kvq_linear part{};
        part.matrix = matrix;
        part.panels = panels + size_t(expert) * layout.panels * layout.panel_bytes;
        part.bias = bias ? bias + size_t(expert) * matrix.rows : nullptr;
        part.x = x, part.out = out, part.tokens = static_cast<int32_t>(tokens);
        part.activation = activation, part.view = call_.view;
        return run_linear(part, pool_);
    }

    static float* grown(std::vector<float>& buffer, size_t count) {
        if (buffer.size() < count) buffer.resize(count);
        return buffer.data();
    }

    const kvq_experts& call_;
    const Parallel& pool_;
    Scratch& scratch_;
    Residency* residency_;  // null: the system decides what stays in memory
    Residency::Layer* layer_ = nullptr;
};

}  // namespace

int run_experts(const kvq_experts& call, const Parallel& pool) {
    const kvq_matrix &up = call.gate_up, &down = call.down;
    if (!is_stackable(up) || !is_stackable(down) || up.rows != 2 * down.columns ||
        up.columns != down.rows || call.tokens < 0 || call.chosen < 1 || call.chosen > call.count ||
        call.activation < KVQ_SILU || call.activation > KVQ_CLAMPED_SWIGLU ||
        (call.scoring != KVQ_SOFTMAX && call.scoring != KVQ_SIGMOID) ||
        (call.choice_bias && call.scoring != KVQ_SIGMOID) ||
        (call.view != KVQ_FULL && call.view != KVQ_HI))
        return KVQ_BAD_ARGUMENT;
    const std::shared_ptr<Residency> residency = Handles<Residency>::all().find(call.residency);
    if (call.residency && !residency) return KVQ_CLOSED;
    try {
        KeptRoom<Scratch> scratch;
        return Mixture(call, pool, scratch.room(), residency.get()).run();
    } catch (const std::bad_alloc&) {
        return KVQ_NO_MEMORY;
    }
}

}  // namespace kvq

extern "C" int kvq_experts_run(const kvq_experts* call) {
    return kvq::run_experts(*call, kvq::kSerial);
}
