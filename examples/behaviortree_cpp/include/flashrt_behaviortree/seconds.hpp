#ifndef FLASHRT_BEHAVIORTREE__SECONDS_HPP_
#define FLASHRT_BEHAVIORTREE__SECONDS_HPP_

#include <cstdint>

#include "builtin_interfaces/msg/duration.hpp"

namespace flashrt_behaviortree
{

/// Return a duration message; a port holds seconds as a number.
inline builtin_interfaces::msg::Duration seconds(double value)
{
  builtin_interfaces::msg::Duration duration;
  duration.sec = static_cast<int32_t>(value);
  duration.nanosec = static_cast<uint32_t>((value - duration.sec) * 1e9);
  return duration;
}

}  // namespace flashrt_behaviortree

#endif  // FLASHRT_BEHAVIORTREE__SECONDS_HPP_
