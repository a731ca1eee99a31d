// Prefetches of paged decode attention. Included by every isa/<name>.cpp.
#pragma once

#include SWIFTAPEX_SIMD

namespace swiftapex::SWIFTAPEX_ISA {

// Fetches memory a few lines at a time, spread over the steps of a loop.
//
// `far`: the next tile, from memory into the second-level cache. Its lines are requested from two
// places in turn, in its K plane and in its V plane: a hardware prefetcher follows each of them
// within its page, and together they keep more requests on their way than one core has line buffers
// for.
// `near`: what is read kNearBytes later, on its way into the first-level cache: the rest of this
// plane, then the beginning of the one that follows. Fetching from memory straight into that cache
// leaves memory idle, for want of line buffers.
struct Prefetch {
    static constexpr int kStreams = 2;
    static constexpr int kGroup = kStreams * 64;  // bytes that are fetched at once
    static constexpr int kNearBytes = 32 * 64;

    struct Near {
        const char *at, *end, *after;  // `after` follows `end`
        int groups;
    };

    const char* far[kStreams];
    int far_groups;  // that are left
    Near near;
    int groups_per_step, steps_per_group;  // one of them is 1
    int wait;                              // steps up to the next group

    static Prefetch over(const char* const (&far)[kStreams], int far_groups, const Near& near,
                         int steps) {
        const int groups = far_groups > near.groups ? far_groups : near.groups;
        if (steps == 0 || groups == 0) return {{}, 0, {}, 0, 0, 0};
        return {{far[0], far[1]},
                far_groups,
                near,
                (groups + steps - 1) / steps,
                steps > groups ? steps / groups : 1,
                1};
    }

    [[gnu::always_inline]] void step() {
        if (--wait > 0) return;
        wait = steps_per_group;
        for (int i = 0; i < groups_per_step; ++i) {
            if (far_groups > 0) fetch_far();
            if (near.groups > 0) fetch_near();
        }
    }

    [[gnu::always_inline]] void fetch_far() {
        --far_groups;
        for (int j = 0; j < kStreams; ++j) {
            prefetch_far(far[j]);
            far[j] += 64;
        }
    }

    [[gnu::always_inline]] void fetch_near() {
        --near.groups;
        for (int j = 0; j < kStreams; ++j) prefetch(near.at + j * 64);
        near.at += kGroup;
        if (near.at >= near.end) {
            near.at = near.after;
            near.end = near.after + near.groups * kGroup;
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
