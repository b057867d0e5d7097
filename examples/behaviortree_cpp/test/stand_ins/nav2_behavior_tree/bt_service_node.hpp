// Stand-in for Nav2: see ../behaviortree_cpp/bt_factory.h.
#pragma once

#include <memory>
#include <string>

#include "behaviortree_cpp/bt_factory.h"

namespace nav2_behavior_tree
{
template<class ServiceT>
class BtServiceNode : public BT::TreeNode
{
public:
  BtServiceNode(const std::string &, const BT::NodeConfiguration &, const std::string & = "") {}
  static BT::PortsList providedBasicPorts(BT::PortsList addition) {return addition;}
  virtual void on_tick() {}
  virtual BT::NodeStatus on_completion(std::shared_ptr<typename ServiceT::Response>)
  {
    return BT::NodeStatus::SUCCESS;
  }

protected:
  std::shared_ptr<typename ServiceT::Request> request_;
  bool should_send_request_ = true;
};
}  // namespace nav2_behavior_tree
