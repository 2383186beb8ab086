// What a layer does after the affine map: z becomes y. Where z ≤ 0, y is 0 (ReLU) or slope·z (leaky ReLU); NaN stays.
#pragma once

namespace gluon_syncbn {

struct Activation {
  enum Kind : int { kNone, kReLU, kLeakyReLU };

  Kind kind = kNone;
  double slope = 0;  // of a leaky ReLU; greater than 0
};

}  // namespace gluon_syncbn
