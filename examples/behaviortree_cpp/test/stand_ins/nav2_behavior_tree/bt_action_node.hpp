// Stand-in for Nav2: see ../behaviortree_cpp/bt_factory.h.
#pragma once

#include <memory>
#include <string>

#include "behaviortree_cpp/bt_factory.h"

namespace nav2_behavior_tree
{
template<class ActionT>
class BtActionNode : public BT::TreeNode
{
public:
  BtActionNode(const std::string &, const std::string &, const BT::NodeConfiguration &) {}
  static BT::PortsList providedBasicPorts(BT::PortsList addition) {return addition;}
  virtual void on_tick() {}
  virtual BT::NodeStatus on_success() {return BT::NodeStatus::SUCCESS;}
  virtual BT::NodeStatus on_aborted() {return BT::NodeStatus::FAILURE;}
  virtual BT::NodeStatus on_cancelled() {return BT::NodeStatus::SUCCESS;}

protected:
  struct WrappedResult {std::shared_ptr<typename ActionT::Result> result;};
  typename ActionT::Goal goal_;
  WrappedResult result_;
};
}  // namespace nav2_behavior_tree
