#include "muster/torch/rpc/remote_error.h"

#include <c10/util/Type.h>

namespace muster::rpc {

void throw_call_error(const CallError& error) {
  if (!error.type.empty()) throw RemoteException(error);
  throw_error(error.error);
}

CallError current_call_error() {
  const auto thrown = [](const std::exception& exception, std::string message) {
    return CallError{{ErrorCode::kInternal, std::move(message)}, c10::demangle(typeid(exception).name()), {}};
  };
  try {
    throw;
  } catch (const RemoteException& exception) {
    return exception.call_error();
  } catch (const ErrorException& exception) {
    return CallError{exception.error(), {}, {}};
  } catch (const c10::Error& exception) {
    return thrown(exception, exception.what_without_backtrace());
  } catch (const std::exception& exception) {
    return thrown(exception, exception.what());
  } catch (...) {
    return CallError{{ErrorCode::kInternal, "the function threw something that is not a std::exception"}, {}, {}};
  }
}

}  // namespace muster::rpc
