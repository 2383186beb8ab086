// Compares mxnet/c_api.h and mxnet/resource_manager.h, which are written by hand, with the headers of an MXNet wheel.
// To compile it is to run it:
//   g++ -std=c++17 -fsyntax-only -fno-access-control -ISITE_PACKAGES/mxnet/include tests/csrc/check_c_api.cpp
#define MSHADOW_USE_CBLAS 0
#define MSHADOW_USE_CUDA 0
#define MSHADOW_USE_F16C 0
#define MSHADOW_USE_MKL 0
#include <mxnet/base.h>
#include <mxnet/c_api.h>
#include <mxnet/engine.h>
#include <mxnet/op_attr_types.h>
#include <mxnet/resource.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace ours {
#include "../../gluon_syncbn/csrc/mxnet/c_api.h"
#include "../../gluon_syncbn/csrc/mxnet/resource_manager.h"
}  // namespace ours

// A function's type, with MXNet's own types taken for those by which ours go.
template <typename T>
struct Plain {
  using type = T;
};
template <>
struct Plain<MXCallbackList*> {
  using type = ours::MXCallbackList*;
};
template <typename Result, typename... Arguments>
struct Plain<Result (*)(Arguments...)> {
  using type = Result (*)(typename Plain<Arguments>::type...);
};

#define SAME(ours_type, theirs) \
  static_assert(std::is_same<ours_type, typename Plain<typename std::decay<theirs>::type>::type>::value, #theirs)
#define SAME_FUNCTION(member, theirs) SAME(decltype(ours::MXNetFunctions::member), decltype(theirs))

SAME_FUNCTION(array_data, MXNDArrayGetData);
SAME_FUNCTION(array_free, MXNDArrayFree);
SAME_FUNCTION(last_error, MXGetLastError);
SAME_FUNCTION(array_create, MXNDArrayCreateEx);
SAME_FUNCTION(engine_push, MXEnginePushSyncND);
SAME_FUNCTION(engine_push_variables, MXEnginePushSync);
SAME_FUNCTION(engine_push_async, MXEnginePushAsyncND);
SAME_FUNCTION(array_wait, MXNDArrayWaitToRead);
SAME_FUNCTION(array_context, MXNDArrayGetContext);
SAME_FUNCTION(array_copy_from_cpu, MXNDArraySyncCopyFromCPU);
SAME_FUNCTION(custom_op_register, MXCustomOpRegister);

SAME(ours::CustomOpDelete, CustomOpDelFunc);
SAME(ours::CustomOpList, CustomOpListFunc);
SAME(ours::CustomOpInferShape, CustomOpInferShapeFunc);
SAME(ours::CustomOpBackwardDependency, CustomOpBwdDepFunc);
SAME(ours::CustomOpCreate, CustomOpCreateFunc);
SAME(ours::CustomOpInferType, CustomOpInferTypeFunc);
SAME(ours::CustomOpRun, CustomOpFBFunc);

static_assert(sizeof(ours::MXCallbackList) == sizeof(MXCallbackList), "");
static_assert(offsetof(ours::MXCallbackList, num_callbacks) == offsetof(MXCallbackList, num_callbacks), "");
static_assert(offsetof(ours::MXCallbackList, callbacks) == offsetof(MXCallbackList, callbacks), "");
static_assert(offsetof(ours::MXCallbackList, contexts) == offsetof(MXCallbackList, contexts), "");

static_assert(ours::kOperatorDelete == static_cast<int>(kCustomOpDelete), "");
static_assert(ours::kOperatorForward == static_cast<int>(kCustomOpForward), "");
static_assert(ours::kOperatorBackward == static_cast<int>(kCustomOpBackward), "");
static_assert(ours::kPropertyDelete == static_cast<int>(kCustomOpPropDelete), "");
static_assert(ours::kPropertyListArguments == static_cast<int>(kCustomOpPropListArguments), "");
static_assert(ours::kPropertyListOutputs == static_cast<int>(kCustomOpPropListOutputs), "");
static_assert(ours::kPropertyListStates == static_cast<int>(kCustomOpPropListAuxiliaryStates), "");
static_assert(ours::kPropertyInferShape == static_cast<int>(kCustomOpPropInferShape), "");
static_assert(ours::kPropertyBackwardDependency == static_cast<int>(kCustomOpPropDeclareBackwardDependency), "");
static_assert(ours::kPropertyCreateOperator == static_cast<int>(kCustomOpPropCreateOperator), "");
static_assert(ours::kPropertyInferType == static_cast<int>(kCustomOpPropInferType), "");

static_assert(static_cast<int>(ours::EngineProperty::kOrdinary) == static_cast<int>(mxnet::FnProperty::kNormal), "");
static_assert(static_cast<int>(ours::EngineProperty::kOrdinaryAtOnce) == static_cast<int>(mxnet::FnProperty::kAsync),
              "");
static_assert(static_cast<int>(ours::EngineProperty::kNoSkip) == static_cast<int>(mxnet::FnProperty::kNoSkip), "");
using Complete = mxnet::engine::CallbackOnComplete;
static_assert(sizeof(ours::OnComplete) == sizeof(Complete), "");
static_assert(offsetof(ours::OnComplete, callback) == offsetof(Complete, callback_), "");
static_assert(offsetof(ours::OnComplete, engine) == offsetof(Complete, engine_), "");
static_assert(offsetof(ours::OnComplete, operation) == offsetof(Complete, param_), "");
static_assert(std::is_same<decltype(Complete::callback_), void (*)(mxnet::Engine*, void*, const dmlc::Error*)>::value,
              "");
static_assert(sizeof(mxnet::Context) == 2 * sizeof(int), "");
static_assert(ours::kCpu == mxnet::Context::kCPU, "");
static_assert(ours::kGpu == mxnet::Context::kGPU && ours::kPinned == mxnet::Context::kCPUPinned, "");
static_assert(ours::kInt32 == mshadow::kInt32 && ours::kInt64 == mshadow::kInt64, "");
static_assert(static_cast<int>(ours::Request::kNull) == mxnet::kNullOp, "");
static_assert(static_cast<int>(ours::Request::kWrite) == mxnet::kWriteTo, "");
static_assert(static_cast<int>(ours::Request::kWriteInplace) == mxnet::kWriteInplace, "");
static_assert(static_cast<int>(ours::Request::kAdd) == mxnet::kAddTo, "");

static_assert(sizeof(ours::DeviceContext) == sizeof(mxnet::Context), "");
static_assert(offsetof(ours::DeviceContext, type) == offsetof(mxnet::Context, dev_type), "");
static_assert(offsetof(ours::DeviceContext, id) == offsetof(mxnet::Context, dev_id), "");
static_assert(sizeof(ours::ResourceRequest) == sizeof(mxnet::ResourceRequest), "");
static_assert(static_cast<int>(ours::ResourceRequest::kRandom) == mxnet::ResourceRequest::kRandom, "");
static_assert(static_cast<int>(ours::ResourceRequest::kTemporarySpace) == mxnet::ResourceRequest::kTempSpace, "");
static_assert(static_cast<int>(ours::ResourceRequest::kParallelRandom) == mxnet::ResourceRequest::kParallelRandom, "");
static_assert(sizeof(ours::Resource) == sizeof(mxnet::Resource), "");
static_assert(offsetof(ours::Resource, request) == offsetof(mxnet::Resource, req), "");
static_assert(offsetof(ours::Resource, variable) == offsetof(mxnet::Resource, var), "");
static_assert(offsetof(ours::Resource, id) == offsetof(mxnet::Resource, id), "");
static_assert(offsetof(ours::Resource, contents) == offsetof(mxnet::Resource, ptr_), "");
// The compiler passes both in the same way.
static_assert(std::is_trivially_copyable<mxnet::Context>::value && std::is_trivially_copyable<mxnet::Resource>::value,
              "");
static_assert(
    std::is_same<decltype(&mxnet::ResourceManager::Request),
                 mxnet::Resource (mxnet::ResourceManager::*)(mxnet::Context, const mxnet::ResourceRequest&)>::value,
    "");
static_assert(std::is_same<decltype(&mxnet::engine::Var::version), size_t (mxnet::engine::Var::*)()>::value, "");

#include "../../gluon_syncbn/csrc/tensor.h"

static_assert(static_cast<int>(gluon_syncbn::DType::kFloat32) == mshadow::kFloat32, "");
static_assert(static_cast<int>(gluon_syncbn::DType::kFloat64) == mshadow::kFloat64, "");
static_assert(static_cast<int>(gluon_syncbn::DType::kFloat16) == mshadow::kFloat16, "");
#if MXNET_MAJOR * 100 + MXNET_MINOR >= 107  // older ones have no bfloat16
static_assert(static_cast<int>(gluon_syncbn::DType::kBFloat16) == mshadow::kBfloat16, "");
#endif
