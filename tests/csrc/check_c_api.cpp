// Compares mxnet/c_api.h, which is written by hand, with the headers of an MXNet wheel. To compile it is to run it:
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
}  // namespace ours

// A function's type, with our types in place of MXNet's.
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
#define EQUAL(number, theirs) static_assert(static_cast<long>(number) == static_cast<long>(theirs), #theirs)
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

EQUAL(sizeof(ours::MXCallbackList), sizeof(MXCallbackList));
EQUAL(offsetof(ours::MXCallbackList, num_callbacks), offsetof(MXCallbackList, num_callbacks));
EQUAL(offsetof(ours::MXCallbackList, callbacks), offsetof(MXCallbackList, callbacks));
EQUAL(offsetof(ours::MXCallbackList, contexts), offsetof(MXCallbackList, contexts));

EQUAL(ours::kOperatorDelete, kCustomOpDelete);
EQUAL(ours::kOperatorForward, kCustomOpForward);
EQUAL(ours::kOperatorBackward, kCustomOpBackward);
EQUAL(ours::kPropertyDelete, kCustomOpPropDelete);
EQUAL(ours::kPropertyListArguments, kCustomOpPropListArguments);
EQUAL(ours::kPropertyListOutputs, kCustomOpPropListOutputs);
EQUAL(ours::kPropertyListStates, kCustomOpPropListAuxiliaryStates);
EQUAL(ours::kPropertyInferShape, kCustomOpPropInferShape);
EQUAL(ours::kPropertyBackwardDependency, kCustomOpPropDeclareBackwardDependency);
EQUAL(ours::kPropertyCreateOperator, kCustomOpPropCreateOperator);
EQUAL(ours::kPropertyInferType, kCustomOpPropInferType);

EQUAL(ours::EngineProperty::kOrdinary, mxnet::FnProperty::kNormal);
EQUAL(ours::EngineProperty::kOrdinaryAtOnce, mxnet::FnProperty::kAsync);
EQUAL(ours::EngineProperty::kNoSkip, mxnet::FnProperty::kNoSkip);
using Complete = mxnet::engine::CallbackOnComplete;
EQUAL(sizeof(ours::OnComplete), sizeof(Complete));
EQUAL(offsetof(ours::OnComplete, callback), offsetof(Complete, callback_));
EQUAL(offsetof(ours::OnComplete, engine), offsetof(Complete, engine_));
EQUAL(offsetof(ours::OnComplete, operation), offsetof(Complete, param_));
static_assert(std::is_same<decltype(Complete::callback_), void (*)(mxnet::Engine*, void*, const dmlc::Error*)>::value);
EQUAL(sizeof(mxnet::Context), 2 * sizeof(int));
EQUAL(ours::kCpu, mxnet::Context::kCPU);
EQUAL(ours::kGpu, mxnet::Context::kGPU);
EQUAL(ours::kPinned, mxnet::Context::kCPUPinned);
EQUAL(ours::Request::kNull, mxnet::kNullOp);
EQUAL(ours::Request::kWrite, mxnet::kWriteTo);
EQUAL(ours::Request::kWriteInplace, mxnet::kWriteInplace);
EQUAL(ours::Request::kAdd, mxnet::kAddTo);

EQUAL(sizeof(ours::DeviceContext), sizeof(mxnet::Context));
EQUAL(offsetof(ours::DeviceContext, type), offsetof(mxnet::Context, dev_type));
EQUAL(offsetof(ours::DeviceContext, id), offsetof(mxnet::Context, dev_id));
EQUAL(sizeof(ours::ResourceRequest), sizeof(mxnet::ResourceRequest));
EQUAL(ours::ResourceRequest::kRandom, mxnet::ResourceRequest::kRandom);
EQUAL(ours::ResourceRequest::kTemporarySpace, mxnet::ResourceRequest::kTempSpace);
EQUAL(ours::ResourceRequest::kParallelRandom, mxnet::ResourceRequest::kParallelRandom);
EQUAL(sizeof(ours::Resource), sizeof(mxnet::Resource));
EQUAL(offsetof(ours::Resource, request), offsetof(mxnet::Resource, req));
EQUAL(offsetof(ours::Resource, variable), offsetof(mxnet::Resource, var));
EQUAL(offsetof(ours::Resource, id), offsetof(mxnet::Resource, id));
EQUAL(offsetof(ours::Resource, contents), offsetof(mxnet::Resource, ptr_));
// The compiler passes both in the same way.
static_assert(std::is_trivially_copyable<mxnet::Context>::value && std::is_trivially_copyable<mxnet::Resource>::value);
static_assert(
    std::is_same<decltype(&mxnet::ResourceManager::Request),
                 mxnet::Resource (mxnet::ResourceManager::*)(mxnet::Context, const mxnet::ResourceRequest&)>::value);
static_assert(std::is_same<decltype(&mxnet::engine::Var::version), size_t (mxnet::engine::Var::*)()>::value);

#include "../../gluon_syncbn/csrc/tensor.h"

EQUAL(gluon_syncbn::DType::kFloat32, mshadow::kFloat32);
EQUAL(gluon_syncbn::DType::kFloat64, mshadow::kFloat64);
EQUAL(gluon_syncbn::DType::kFloat16, mshadow::kFloat16);
#if MXNET_MAJOR * 100 + MXNET_MINOR >= 107  // older ones have no bfloat16
EQUAL(gluon_syncbn::DType::kBFloat16, mshadow::kBfloat16);
#endif
