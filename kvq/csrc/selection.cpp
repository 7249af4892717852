#include "selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvq {

Selection::Selection(const kvq_read& rule, int kv_heads, int tokens, int views)
    : rule_(rule), tokens_(tokens), views_(views) {
    scores_.assign(at(kv_heads, 0), kNothingSeen);
}

void Selection::choose(int kv_head, int token) {
    float* scores = this->scores(kv_head, token);
    const auto seen = views_ - std::count(scores, scores + views_, kNothingSeen);
    const auto kept = static_cast<size_t>(
        std::max(1.0f, std::ceil(rule_.share * static_cast<float>(seen) - 1e-4f)));
    if (kept >= static_cast<size_t>(seen)) return;
    std::vector<int> order(static_cast<size_t>(views_));
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                     [&](int a, int b) {
                         return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                     });
    for (size_t i = kept; i < order.size(); i++) scores[order[i]] = kNothingSeen;
}

void keep_loudest(float* q, int dim, int kept) {
    if (kept <= 0 || kept >= dim) return;
    float loudness[kMaxHeadDim];
    for (int i = 0; i < dim; i++) loudness[i] = std::abs(q[i]);
    std::nth_element(loudness, loudness + dim - kept, loudness + dim);
    const float least = loudness[dim - kept];
    for (int i = 0; i < dim; i++)
        if (std::abs(q[i]) < least) q[i] = 0.0f;
}

}  // namespace kvq
